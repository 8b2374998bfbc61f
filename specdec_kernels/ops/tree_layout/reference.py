"""tree_layout, spelled plainly. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _trees
from ..._codes import Status


def tree_layout(
    parents: Tensor, lengths: Tensor | None, max_depth: int, max_leaves: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.tree_layout`."""
    tree = _trees.tree(parents, max_depth)
    first_child, next_sibling = _trees.links(tree)
    is_leaf = tree.present & (first_child < 0)
    leaves = torch.where(is_leaf, tree.node, -1).sort(dim=1, descending=True).values
    status = torch.where(tree.bad, Status.BAD_LAYOUT, 0)
    status = torch.where(is_leaf.sum(1) > max_leaves, Status.BAD_LAYOUT, status)
    leaves = torch.nn.functional.pad(leaves, (0, max(max_leaves - leaves.shape[1], 0)), value=-1)
    paths = _trees.paths(tree, leaves[:, :max_leaves], max_depth)
    start = torch.zeros_like(tree.depth[:, :1]) if lengths is None else lengths[:, None]
    positions = start + tree.depth.clamp(min=0)
    return (
        tree.depth.int(),
        positions,
        first_child.int(),
        next_sibling.int(),
        _trees.pack(tree.ancestors, 32),
        paths.int(),
        status.int(),
    )
