"""tree_layout in Triton: one launch. Every program follows its tree by itself; nobody waits."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton.codes import S_LAYOUT
from ..._triton.trees import ancestor_word, at_nodes, children_of, neighbours, padded, tree_of

_BLOCK = tl.constexpr(32)  # nodes whose paths a program writes: as many as a word of ancestors has


class _Out(NamedTuple):
    """Results, laid out as `TreeLayout`."""

    depth: Any
    positions: Any
    first_child: Any
    next_sibling: Any
    ancestors: Any
    leaf_paths: Any
    status: Any


@triton.jit
def _write_links(out, b, parent, nodes, NP: tl.constexpr):
    """First child and next sibling: neighbours in the order (parent, node)."""
    n = tl.arange(0, NP)
    ordered = tl.sort((parent + 1) * NP + n)
    node, owner = ordered % NP, ordered // NP - 1
    before, after = neighbours(ordered, NP)
    follows = (n + 1 < NP) & (owner >= 0) & (after // NP - 1 == owner)
    tl.store(out.next_sibling + b * nodes + node, tl.where(follows, after % NP, -1), mask=node < nodes)
    childless = children_of(parent, NP) == 0
    tl.store(out.first_child + b * nodes + n, n * 0 - 1, mask=(n < nodes) & childless)
    tl.store(out.first_child + b * nodes + owner, node, mask=(owner >= 0) & (before // NP - 1 != owner))


@triton.jit
def _write_paths(out, b, block, parent, depth, max_depth, max_leaves, NP: tl.constexpr):
    """Rows of leaf_paths: the leaf with the largest number first, then -1 for every number that is no leaf."""
    is_leaf = (depth >= 0) & (children_of(parent, NP) == 0)
    leaves = tl.sum(is_leaf.to(tl.int32), axis=0)
    earlier = tl.cumsum(is_leaf.to(tl.int32), axis=0)  # itself included
    own = block * _BLOCK + tl.arange(0, _BLOCK)
    place = tl.minimum(own, NP - 1)
    mine = (own < NP) & (tl.gather(is_leaf.to(tl.int32), place, 0) > 0)
    upto = tl.where(own < NP, tl.gather(earlier, place, 0), leaves)
    # Who is no leaf takes a row behind the last: every row has exactly one writer.
    row = tl.where(mine, leaves - upto, leaves + own - upto)
    steps = tl.where(mine, tl.gather(depth, place, 0), -1)
    width = max_depth + 1
    at = out.leaf_paths + (b * max_leaves + row) * width
    for start in range(0, width, _BLOCK):
        column = start + tl.arange(0, _BLOCK)
        mask = (row < max_leaves)[:, None] & (column < width)[None, :] & (column[None, :] > steps[:, None])
        tl.store(at[:, None] + column[None, :], tl.full([_BLOCK, _BLOCK], -1, tl.int32), mask=mask)
    node = tl.where(mine, own, -1)
    for _ in range(0, tl.max(steps, axis=0) + 1):
        tl.store(at + steps, node, mask=(node >= 0) & (row < max_leaves))
        node = tl.where(steps > 0, at_nodes(parent, node), -1)
        steps -= 1
    return leaves


@triton.jit
def _layout_kernel(parents, lengths, out, nodes, words, max_depth, max_leaves, blocks, NP: tl.constexpr):
    """depth[n] = depth[parents[n]] + 1, ancestors[n] = ancestors[parents[n]] | bit n.

    Grid: batch * blocks; a program owns one word of the ancestors of all nodes, and the paths of its 32 nodes.
    """
    pid = tl.program_id(0).to(tl.int64)
    b = pid // blocks
    block = (pid % blocks).to(tl.int32)
    n = tl.arange(0, NP)
    parent, depth, bad = tree_of(parents, b, nodes, max_depth, NP)
    if block < words:
        word = ancestor_word(parent, block, nodes, NP)
        tl.store(out.ancestors + (b * nodes + n) * words + block, word, mask=n < nodes)
    leaves = _write_paths(out, b, block, parent, depth, max_depth, max_leaves, NP)
    if block == 0:
        start = tl.full([], 0, tl.int64)
        if lengths is not None:
            start = tl.load(lengths + b)
        tl.store(out.depth + b * nodes + n, depth, mask=n < nodes)
        tl.store(out.positions + b * nodes + n, start + tl.maximum(depth, 0), mask=n < nodes)
        _write_links(out, b, parent, nodes, NP)
        tl.store(out.status + b, tl.where(bad | (leaves > max_leaves), S_LAYOUT, 0))


def tree_layout_out(
    parents: Tensor, lengths: Tensor | None, max_depth: int, max_leaves: int,
    depth: Tensor, positions: Tensor, first_child: Tensor, next_sibling: Tensor, ancestors: Tensor,
    leaf_paths: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.tree_layout`."""
    batch, nodes = parents.shape
    blocks = triton.cdiv(max(nodes, max_leaves), _BLOCK.value)
    out = _Out(depth, positions, first_child, next_sibling, ancestors, leaf_paths, status)
    host.launch(
        _layout_kernel, batch * blocks, parents, lengths, out, nodes, ancestors.shape[2], max_depth, max_leaves,
        blocks, NP=padded(nodes),
    )  # fmt: skip
