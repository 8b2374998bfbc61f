"""Traversal verification (Weng et al. 2025), spelled plainly: leaves first, in depth-first order.

weight(root) = 1, weight(child) = min(1, weight(parent) p(x) / q(x)). The first leaf in depth-first order is accepted
iff its coin < its weight, and its path is emitted; the root always is. Else the leaf is deleted, and at its parent,
with S = sum (weight p - q)+:  p = norm((weight p - q)+), weight = S / (S + 1 - weight), q = norm(q without x).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _rows
from ..._codes import RESIDUAL_PURPOSE, Status
from .call import Call, at, first, flag


class _Rows:
    """Current distributions of every node: numerators of p and q, and the weights that deletions have fixed."""

    def __init__(self, call: Call) -> None:
        nodes = [torch.full_like(call.slot, n) for n in range(call.nodes)]
        distributions = [call.target_distribution(node) for node in nodes]
        drafts = [call.draft_probs(node, torch.zeros_like(node)) for node in nodes]
        self.call = call
        self.p = torch.stack([distribution.probs() for distribution in distributions], 1)  # [batch, nodes, vocab]
        self.bad_target = torch.stack([distribution.bad for distribution in distributions], 1)
        self.q = torch.stack([q for q, _ in drafts], 1)
        self.bad_draft = torch.stack([bad for _, bad in drafts], 1)
        self.tried = torch.zeros_like(self.p, dtype=torch.bool)
        self.fixed = torch.ones_like(self.p[:, :, 0])
        self.is_fixed = torch.zeros_like(self.fixed, dtype=torch.bool)
        self.is_empty = torch.zeros_like(self.is_fixed)

    def pair(self, node: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(p, q) of a node, float64 [batch, vocab]; where drafts are point masses q is one at x."""
        p, q = self.p[self.call.slot, node], self.q[self.call.slot, node]
        q = q / q.sum(1, keepdim=True).clamp(min=1e-300)
        point = torch.nn.functional.one_hot(x, self.call.vocab).double()
        return p, torch.where(self.call.has_draft_row[:, None], q, point)

    def child_weight(self, node: Tensor, weight: Tensor, child: Tensor) -> Tensor:
        """Weight of a child whose parent has `weight`."""
        x = self.call.candidate(child)
        p, q = self.pair(node, x)
        px, qx = at(p, x), at(q, x)
        ratio = torch.where(qx > 0, px / qx.clamp(min=1e-300), 0.0)
        plain = (weight * ratio).clamp(max=1.0)
        return torch.where(at(self.is_fixed, child), at(self.fixed, child), plain)

    def delete(self, node: Tensor, weight: Tensor, child: Tensor, where: Tensor) -> None:
        """Take a child from the distributions of its parent `node`."""
        slot, x = self.call.slot, self.call.candidate(child)
        p, q = self.pair(node, x)
        excess = (weight[:, None] * p - q).clamp(min=0)
        mass = excess.sum(1)
        free = mass + 1 - weight
        after = torch.where(free > 0, mass / free.clamp(min=1e-300), 1.0)
        left = torch.where((mass > 0)[:, None], excess / mass.clamp(min=1e-300)[:, None], p)
        point = torch.nn.functional.one_hot(x, self.call.vocab).bool()
        self.p[slot, node] = torch.where(where[:, None], left, p)
        self.q[slot, node] = torch.where(where[:, None] & point, 0.0, self.q[slot, node])
        self.tried[slot, node] |= where[:, None] & point
        self.fixed[slot, node] = torch.where(where, after, at(self.fixed, node))
        self.is_fixed[slot, node] |= where
        self.is_empty[slot, node] |= where & (mass == 0)


def _examine(rows: _Rows, call: Call, status: Tensor) -> tuple[Tensor, Tensor]:
    """(nodes that take part, status): a child behind a bad row, and one that is no id, is cut off with its subtree."""
    alive = [torch.ones_like(call.slot, dtype=torch.bool)]
    weight = [torch.ones_like(rows.fixed[:, 0])]
    for n in range(call.nodes):
        node = torch.full_like(call.slot, n)
        if n > 0:
            parent = call.tree.parents[:, n]
            f = parent.clamp(min=0)
            above = at(torch.stack(weight, 1), f)
            # A greedy request is decided at its first miss; what lies behind is not examined.
            here = (parent >= 0) & at(torch.stack(alive, 1), f) & ~(call.target.greedy & (above == 0))
            status = flag(status, here & call.outside[:, n], Status.BAD_ID)
            here = here & call.usable[:, n] & ~at(rows.bad_target, f)
            status = flag(status, here & at(rows.bad_draft, f), Status.BAD_DRAFT)
            here = here & ~at(rows.bad_draft, f)
            x = call.candidate(node)
            status = flag(status, here & (at(rows.pair(f, x)[1], x) == 0), Status.ZERO_DRAFT)
            alive.append(here)
            weight.append(rows.child_weight(f, above, node))
        greedy_miss = call.target.greedy & (weight[n] == 0)
        status = flag(status, alive[n] & rows.bad_target[:, n] & ~greedy_miss, Status.BAD_TARGET)
    return torch.stack(alive, 1), status


def traverse(call: Call, max_depth: int, status: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(where it ends, the token after it, status)."""
    rows = _Rows(call)
    alive, status = _examine(rows, call, status)
    stand = torch.zeros_like(call.slot)
    running = torch.ones_like(call.slot, dtype=torch.bool)
    for _ in range(call.nodes):
        leaf, above = torch.zeros_like(stand), torch.zeros_like(stand)
        weight = at(rows.fixed, leaf)
        weight_above = weight
        for _ in range(max_depth):
            child, descends = first(call.children(leaf) & alive)
            below = rows.child_weight(leaf, weight, child)
            above, weight_above = torch.where(descends, leaf, above), torch.where(descends, weight, weight_above)
            leaf, weight = torch.where(descends, child, leaf), torch.where(descends, below, weight)
        accepted = running & ((leaf == 0) | (call.coin(leaf) < weight.float()))
        stand = torch.where(accepted, leaf, stand)
        running = running & ~accepted
        rows.delete(above, weight_above, leaf, running)
        alive = alive & ~(running[:, None] & (call.tree.node == leaf[:, None]))

    row, noise = call.target_distribution(stand), call.noise(stand, RESIDUAL_PURPOSE)
    deleted = at(rows.is_fixed, stand)
    drawn, empty = _rows.residual_draw(rows.p[call.slot, stand].float(), noise)
    tried = rows.tried[call.slot, stand]
    point = ~call.has_draft_row
    without, nothing = _rows.draw_without(row, noise, tried)
    drawn = torch.where(point, without, drawn)
    empty = deleted & torch.where(point, nothing, empty | at(rows.is_empty, stand))
    status = flag(status, empty, Status.EMPTY_RESIDUAL)
    return stand, torch.where(deleted & ~empty, drawn, _rows.plain_draw(row, noise)), status
