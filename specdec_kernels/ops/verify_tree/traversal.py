"""Traversal verification (Weng et al. 2025), spelled plainly: leaves first, in depth-first order.

weight(root) = 1, weight(child) = min(1, weight(parent) p(x) / q(x)). The first leaf in depth-first order is accepted
iff its coin < its weight, and its path is emitted; the root always is. Else the leaf is deleted, and at its parent,
with S = sum (weight p - q)+:  p = norm((weight p - q)+), weight = S / (S + 1 - weight), q = norm(q without x).

Each deletion takes one exchange of the vocabulary, because it changes the distribution that the next one starts from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._codes import RESIDUAL_PURPOSE, Status
from ..._nodes import Nodes, at
from ..._walks import End, choose, first, flag


class _Traversal:
    """Current numbers of every node; the rows of p and q are this rank's part."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        p, q = nodes.probs(nodes.every)
        shape = (nodes.batch, nodes.nodes)
        self.p_row, self.q_row = p.unflatten(0, shape), q.unflatten(0, shape)
        self.p, self.q = nodes.p.clone(), nodes.q.clone()  # of each candidate, in its parent's current row
        self.q_sum, self.fixed = torch.ones_like(self.p), torch.ones_like(self.p)
        self.tried = torch.zeros_like(nodes.usable)
        self.is_fixed, self.is_empty = torch.zeros_like(self.tried), torch.zeros_like(self.tried)

    def child_q(self, child: Tensor) -> Tensor:
        """The q of a candidate; where drafts are point masses it is one."""
        above = at(self.nodes.above, child)
        q = at(self.q, child) / at(self.q_sum, above).clamp(min=1e-300)
        return torch.where(self.nodes.has_draft_row, q, 1.0)

    def child_weight(self, weight: Tensor, child: Tensor) -> Tensor:
        """Weight of a child whose parent has `weight`."""
        px, qx = at(self.p, child), self.child_q(child)
        ratio = torch.where(qx > 0, px / qx.clamp(min=1e-300), 0.0)
        plain = (weight * ratio).clamp(max=1.0)
        return torch.where(at(self.is_fixed, child), at(self.fixed, child), plain)

    def delete(self, node: Tensor, weight: Tensor, child: Tensor, where: Tensor) -> None:
        """Take a child from the distributions of its parent `node`: one exchange."""
        nodes, has = self.nodes, self.nodes.has_draft_row[:, None]
        is_child = (nodes.tree.node == child[:, None]) & where[:, None]
        x = nodes.marked(node[:, None], is_child)
        p_row, q_row = self.p_row[nodes.request, node], self.q_row[nodes.request, node]
        q_sum = at(self.q_sum, node).clamp(min=1e-300)
        q = torch.where(has, q_row / q_sum[:, None], x.double())
        excess = (weight[:, None] * p_row - q).clamp(min=0)
        q_row = torch.where(x, 0.0, q_row)
        mass, q_left = nodes.vocabulary.sum(excess.sum(1), q_row.sum(1))
        free = mass + 1 - weight
        after = torch.where(free > 0, mass / free.clamp(min=1e-300), 1.0)
        some = mass.clamp(min=1e-300)[:, None]
        p_row = torch.where((where & (mass > 0))[:, None], excess / some, p_row)
        self.p_row[nodes.request, node], self.q_row[nodes.request, node] = p_row, q_row

        siblings = (nodes.tree.parents == node[:, None]) & where[:, None]
        q = torch.where(has, self.q / q_sum[:, None], (nodes.x == at(nodes.x, child)[:, None]).double())
        left = (weight[:, None] * self.p - q).clamp(min=0) / some
        self.p = torch.where(siblings & (mass > 0)[:, None], left, self.p)
        self.q = torch.where(is_child, 0.0, self.q)
        self.tried = self.tried | is_child
        here = (nodes.tree.node == node[:, None]) & where[:, None]
        self.q_sum = torch.where(here, q_left[:, None], self.q_sum)
        self.fixed = torch.where(here, after[:, None], self.fixed)
        self.is_fixed = self.is_fixed | here
        self.is_empty = self.is_empty | (here & (mass == 0)[:, None])


def _examine(now: _Traversal, status: Tensor) -> tuple[Tensor, Tensor]:
    """(nodes that take part, status): a child behind a bad row, and one that is no id, is cut off with its subtree."""
    nodes = now.nodes
    alive = [torch.ones_like(nodes.has_draft_row)]
    weight = [torch.ones_like(nodes.p[:, 0])]
    for n in range(nodes.nodes):
        if n > 0:
            f = nodes.above[:, n]
            above = at(torch.stack(weight, 1), f)
            # A greedy request is decided at its first miss; what lies behind is not examined.
            here = (nodes.tree.parents[:, n] >= 0) & at(torch.stack(alive, 1), f)
            here = here & ~(nodes.target.greedy & (above == 0))
            status = flag(status, here & nodes.outside[:, n], Status.BAD_ID)
            here = here & nodes.usable[:, n] & ~at(nodes.bad, f)
            status = flag(status, here & nodes.bad_draft[:, n], Status.BAD_DRAFT)
            here = here & ~nodes.bad_draft[:, n]
            node = torch.full_like(f, n)
            status = flag(status, here & (now.child_q(node) == 0), Status.ZERO_DRAFT)
            alive.append(here)
            weight.append(now.child_weight(above, node))
        greedy_miss = nodes.target.greedy & (weight[n] == 0)
        status = flag(status, alive[n] & nodes.bad[:, n] & ~greedy_miss, Status.BAD_TARGET)
    return torch.stack(alive, 1), status


def traverse(nodes: Nodes, max_depth: int, status: Tensor) -> End:
    """Leaves first, in depth-first order."""
    now = _Traversal(nodes)
    alive, status = _examine(now, status)
    last = torch.zeros_like(nodes.request)
    running = torch.ones_like(last, dtype=torch.bool)
    for deleted in range(nodes.nodes):
        leaf, above = torch.zeros_like(last), torch.zeros_like(last)
        weight = at(now.fixed, leaf)
        weight_above = weight
        for _ in range(max_depth):
            child, descends = first((nodes.tree.parents == leaf[:, None]) & alive)
            below = now.child_weight(weight, child)
            above, weight_above = torch.where(descends, leaf, above), torch.where(descends, weight, weight_above)
            leaf, weight = torch.where(descends, child, leaf), torch.where(descends, below, weight)
        accepted = running & ((leaf == 0) | (at(nodes.coin, leaf) < weight.float()))
        last = torch.where(accepted, leaf, last)
        running = running & ~accepted
        if deleted == nodes.nodes - 1:
            break  # the root alone was left
        now.delete(above, weight_above, leaf, running)
        alive = alive & ~(running[:, None] & (nodes.tree.node == leaf[:, None]))

    tried = now.tried & (nodes.tree.parents == last[:, None])
    point = ~nodes.has_draft_row
    weight = now.p_row[nodes.request, last].float()
    plain, left, _ = nodes.race(last[:, None], RESIDUAL_PURPOSE, weight, tried, point)
    left = left._replace(empty=left.empty | (at(now.is_empty, last) & ~point)[:, None])
    return choose(last, plain, left, at(now.is_fixed, last), status)
