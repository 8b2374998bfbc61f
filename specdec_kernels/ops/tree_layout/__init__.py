"""Structure of a candidate tree: depths, positions, links, ancestor bits, leaf paths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._check import SIZE_BITS, Checker
from ..._codes import Backend
from ..._op import Op, Shape
from . import reference


class TreeLayout(NamedTuple):
    """Result of `tree_layout`.

    Attributes:
        depth: int32 ``[batch, nodes]``; the root has 0, padding -1.
        positions: int64 ``[batch, nodes]``: ``lengths + depth``; padding has the root's.
        first_child: int32 ``[batch, nodes]``, -1 for none.
        next_sibling: int32 ``[batch, nodes]``, the next node with the same parent, -1 for none.
        ancestors: int32 ``[batch, nodes, ceil(nodes / 32)]``: bit j % 32 of word j // 32 says that j is the node or one
            of its ancestors. Padding has its own bit alone.
        leaf_paths: int32 ``[batch, max_leaves, max_depth + 1]``: nodes from the root to each leaf, -1 padded; the leaf
            with the largest number first (Medusa's retrieve_indices).
        status: int32 ``[batch]``: 32 malformed parents, then the tree is its root alone; or more leaves than rows.
    """

    depth: Tensor
    positions: Tensor
    first_child: Tensor
    next_sibling: Tensor
    ancestors: Tensor
    leaf_paths: Tensor
    status: Tensor


def _shapes(parents: Tensor, lengths: Tensor | None, max_depth: int, max_leaves: int) -> tuple[Shape, ...]:
    batch, nodes = parents.shape
    each = (parents.shape, torch.int32)
    return (
        each, (parents.shape, torch.int64), each, each, ((batch, nodes, (nodes + 31) // 32), torch.int32),
        ((batch, max_leaves, max_depth + 1), torch.int32), ((batch,), torch.int32),
    )  # fmt: skip


op = Op(reference.tree_layout, _shapes, results=TreeLayout._fields)


def tree_layout(
    parents: Tensor,
    *,
    lengths: Tensor | None = None,
    max_depth: int | None = None,
    max_leaves: int | None = None,
    out: TreeLayout | None = None,
    backend: Backend | None = None,
) -> TreeLayout:
    """Depths, positions, links, ancestor bits and leaf paths of trees given by their parents.

    ``depth[n] = depth[parents[n]] + 1``, ``ancestors[n] = ancestors[parents[n]] | bit n``.

    Args:
        parents: int32 or int64 ``[batch, nodes]``: ``parents[0] = -1``, ``parents[n] < n``; -1 for n > 0 is padding.
        lengths: int64 ``[batch]``: position of the root; None is 0.
        max_depth: longest path of the batch, a host int; by default ``nodes - 1``. A deeper tree is malformed.
        max_leaves: rows of leaf_paths, a host int; by default ``nodes``.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        TreeLayout.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import tree_layout
        >>> layout = tree_layout(torch.tensor([[-1, 0, 0, 1]]), lengths=torch.tensor([10]))
        >>> layout.positions, layout.leaf_paths[0, :2, :3]
        (tensor([[10, 11, 11, 12]]), tensor([[ 0,  1,  3],
                [ 0,  2, -1]], dtype=torch.int32))
    """
    name = "tree_layout"
    check = Checker.of(name, "parents", parents, "of int32 or int64")
    batch, nodes = check.parents(parents)
    if lengths is not None:
        lengths = check.vector("lengths", lengths, (torch.int64,), batch)
    depth = check.size("max_depth", nodes - 1 if max_depth is None else max_depth, 0, SIZE_BITS)
    leaves = check.size("max_leaves", nodes if max_leaves is None else max_leaves, 1, SIZE_BITS)
    results = op(parents, lengths, depth, leaves, device=parents.device, backend=backend, out=out)
    return TreeLayout(*results)
