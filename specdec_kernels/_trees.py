"""Trees of candidates as arrays of parents, in plain PyTorch: what is a tree, and who descends from whom.

Node 0 is the root, the last committed token. parents[0] = -1; parents[n] < n; -1 for n > 0 is padding. Nothing here
loops over data: parents are followed by doubling (1, 2, 4 ... steps at once), so a malformed tree costs no more than
a good one. A malformed tree is flagged and counts as its root alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    """Checked trees of a batch; a bad one is its root alone."""

    parents: Tensor  # int64 [batch, nodes], -1 at the root and at padding
    present: Tensor  # bool [batch, nodes]
    depth: Tensor  # int64 [batch, nodes], 0 at the root, -1 at padding
    ancestors: Tensor  # bool [batch, nodes, nodes]: column is row or one of its ancestors; padding knows itself alone
    bad: Tensor  # bool [batch]: status bit 32

    @property
    def node(self) -> Tensor:
        """int64 [nodes]: the number of each node."""
        return torch.arange(self.parents.shape[1], device=self.parents.device)


def tree(parents: Tensor, max_depth: int) -> Tree:
    """Check parents [batch, nodes] and follow them; deeper than max_depth is malformed too."""
    nodes = parents.shape[1]
    parents = parents.long()
    node = torch.arange(nodes, device=parents.device)
    present = (parents != -1) | (node == 0)
    fits = (parents >= 0) & (parents < node) & present.gather(1, parents.clamp(0, nodes - 1))
    bad = torch.where(node == 0, parents != -1, present & ~fits).any(1)
    parents = torch.where(bad[:, None], -1, parents)

    jump = torch.where(parents >= 0, parents, node)
    depth = (parents >= 0).long()
    ancestors = (node == node[:, None]) | (node == jump[:, :, None])
    for _ in range((nodes - 1).bit_length()):
        depth = depth + depth.gather(1, jump)
        ancestors = ancestors | ancestors.gather(1, jump[:, :, None].expand_as(ancestors))
        jump = jump.gather(1, jump)

    depth = torch.where((parents >= 0) | (node == 0), depth, -1)
    checked = Tree(parents, (parents >= 0) | (node == 0), depth, ancestors, bad)
    return root_only(checked, (depth > max_depth).any(1))


def root_only(tree: Tree, bad: Tensor) -> Tree:
    """The same trees, but of those that are bad [batch] the root alone, flagged."""
    node, lost = tree.node, bad[:, None]
    return Tree(
        torch.where(lost, -1, tree.parents),
        torch.where(lost, node == 0, tree.present),
        torch.where(lost & (node > 0), -1, tree.depth),
        torch.where(lost[:, :, None], node == node[:, None], tree.ancestors),
        tree.bad | bad,
    )


def links(tree: Tree) -> tuple[Tensor, Tensor]:
    """(first child, next sibling), int64 [batch, nodes], -1 where there is none; siblings in node order."""
    node, nodes = tree.node, tree.parents.shape[1]
    mine = tree.parents[:, None, :] == node[:, None]  # [batch, parent, child]
    first_child = torch.where(mine, node, nodes).amin(2)
    sibling = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (tree.parents >= 0)[:, :, None]
    next_sibling = torch.where(sibling & (node > node[:, None]), node, nodes).amin(2)
    return torch.where(first_child < nodes, first_child, -1), torch.where(next_sibling < nodes, next_sibling, -1)


def ranks(tree: Tree) -> Tensor:
    """Rank of each node among the nodes of its depth, int64 [batch, nodes]: the index of its coin."""
    earlier = tree.node < tree.node[:, None]
    return ((tree.depth[:, :, None] == tree.depth[:, None, :]) & earlier).sum(2)


def paths(tree: Tree, ends: Tensor, max_depth: int) -> Tensor:
    """Nodes from the root to each end, [batch, ends, max_depth + 1], -1 padded; an end of -1 has no path."""
    node = tree.node.expand(*ends.shape, -1)
    on_path = tree.ancestors.gather(1, ends.clamp(min=0)[:, :, None].expand(-1, -1, len(tree.node)))
    on_path = on_path & (ends >= 0)[:, :, None]
    column = torch.where(on_path, tree.depth[:, None, :], max_depth + 1)
    out = torch.full((*ends.shape, max_depth + 2), -1, device=ends.device)
    return out.scatter(2, column, node)[:, :, : max_depth + 1].contiguous()


def pack(bits: Tensor, width: int) -> Tensor:
    """Bits of the last axis in words of `width` (8: uint8, 32: int32), lowest bit first."""
    words = -(-bits.shape[-1] // width)
    bits = torch.nn.functional.pad(bits, (0, words * width - bits.shape[-1])).unflatten(-1, (words, width))
    word = (bits.long() << torch.arange(width, device=bits.device)).sum(-1)
    return word.to(torch.uint8) if width == 8 else torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def attends(
    ancestors: Tensor, depth: Tensor, past: Tensor, left_padding: Tensor, window: int,
    request: Tensor, query: Tensor, key: Tensor,
) -> Tensor:  # fmt: skip
    """Whether node `query` of a request attends key column `key`: the predicate behind every mask format.

    Columns: left_padding unused ones, then cached tokens up to past, then the nodes. A node attends what is cached, its
    ancestors and itself; with a window w only what lies less than w positions before it. Padding attends itself alone.

    Args:
        ancestors: int32 ``[batch, nodes, words]``, packed.
        depth: ``[batch, nodes]``, -1 at padding.
        past: ``[batch]``, column of node 0.
        left_padding: ``[batch]``.
        window: 0 is off.
        request: indices that broadcast with `query` and `key`.
        query: see `request`.
        key: see `request`.
    """
    nodes = depth.shape[1]
    start = past[request]
    node = (key - start).clamp(0, nodes - 1)
    in_tree = (key >= start) & (key < start + nodes)
    is_ancestor = ((ancestors[request, query, node >> 5] >> (node & 31).to(torch.int32)) & 1) == 1
    mine = depth[request, query]
    cached = (key >= left_padding[request]) & (key < start) & (mine >= 0)
    seen = (in_tree & is_ancestor) | cached
    if window:
        distance = torch.where(in_tree, mine - depth[request, node], start + mine - key)
        seen = seen & (distance < window)
    return seen
