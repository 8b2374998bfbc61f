"""Rules that need masses sum (a p - b q)+ before they can decide: block, recursive, traversal.

`block` sends the masses together with the draws of all rows, since its weights are known after the first exchange.
`recursive` takes one exchange for each further sibling, for all nodes of the tree at once: what the rejection of the
first j children leaves does not depend on the walk. `traversal` takes one for each node it deletes, because each
deletion changes the distribution that the next one starts from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._codes import RESIDUAL_PURPOSE, Status
from .group import added
from .nodes import Nodes, at
from .rules import End, choose, descend, finish, first, flag, of_parent, testable


def block(nodes: Nodes, lost: Tensor, status: Tensor) -> tuple[End, Tensor]:
    """A chain: (end, requests whose bonus row is bad). w, S, h and tau as in the reference."""
    width = nodes.nodes - 1
    walking = ~lost
    length = torch.zeros_like(nodes.request)
    bonus_bad = torch.zeros_like(walking)
    weights = [torch.ones_like(nodes.p[:, 0])]
    for i in range(width + 1):
        n = min(i + 1, width)  # the candidate of row i; the last row has none
        has_one = walking if i < width else torch.zeros_like(walking)
        outside, ends = nodes.outside[:, n], ~nodes.usable[:, n]
        status = flag(status, has_one & outside, Status.BAD_ID)
        status = flag(status, walking & nodes.bad[:, i], Status.BAD_TARGET)
        bonus_bad = bonus_bad | (walking & nodes.bad[:, i])
        walking = has_one & ~nodes.bad[:, i] & ~ends
        if i == width:
            break
        status = flag(status, walking & nodes.bad_draft[:, n], Status.BAD_DRAFT)
        walking = walking & ~nodes.bad_draft[:, n]
        length = length + walking.long()
        px, qx = nodes.p[:, n], nodes.q[:, n]
        status = flag(status, walking & (qx == 0), Status.ZERO_DRAFT)
        ratio = torch.where(qx > 0, px / qx.clamp(min=1e-300), 0.0)
        weights.append((weights[-1] * ratio).clamp(max=1.0))
        # A greedy request is decided at its first miss; what lies behind is not examined.
        walking = walking & ~(nodes.target.greedy & (weights[-1] == 0))
    w = torch.stack(weights, 1)

    p, q = nodes.probs(nodes.every)
    point = ~nodes.has_draft_row
    points = point[:, None].expand_as(w).reshape(-1, 1)
    q = torch.where(points, nodes.marked(nodes.every, nodes.usable).double(), q)
    scaled = w.flatten()[:, None] * p
    mass = (scaled - q).clamp(min=0).sum(1).view(w.shape)
    weight = torch.where(nodes.distribution.kept, scaled.float() - q.float(), 0.0)
    plain, left, got = nodes.race(nodes.every, RESIDUAL_PURPOSE, weight, nodes.usable, point, (mass,))
    mass = added(got[0])

    accepted = torch.zeros_like(length)
    for i in range(1, width + 1):
        free = mass[:, i] + 1 - w[:, i] if i < width else torch.ones_like(w[:, 0])
        inner = torch.where(free > 0, mass[:, i] / free.clamp(min=1e-300), 1.0) if i < width else w[:, i]
        h = torch.where(length == i, w[:, i], inner).float()
        accepted = torch.where((i <= length) & (nodes.coin[:, i] < h), i, accepted)
    full = accepted == length
    plain, left = (type(d)(*(at(part, accepted)[:, None] for part in d)) for d in (plain, left))
    end = choose(accepted, plain, left, ~full & ~lost, status)
    return end, full & bonus_bad


def recursive(nodes: Nodes, replacement: bool, rounds: int, max_depth: int, status: Tensor) -> End:
    """Children are tried in turn, each against what the rejections before it left: C, Z, Q as in the reference."""
    fine, faults = testable(nodes, True)
    tree, point = nodes.tree, ~nodes.has_draft_row[:, None]
    earlier = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (tree.node < tree.node[:, None])
    rank = earlier.sum(2)
    twin = (earlier & fine[:, None, :] & (nodes.x[:, :, None] == nodes.x[:, None, :])).any(2)
    children = (tree.parents[:, None, :] == tree.node[:, None]).sum(2)
    scale, mass, gone = (torch.full_like(nodes.p, value) for value in (0.0, 1.0, 0.0))
    passes, tried = torch.zeros_like(fine), torch.zeros_like(fine)
    for r in range(rounds):
        tested = fine & (rank == r) & (tree.parents >= 0)
        c, z = of_parent(nodes, scale), of_parent(nodes, mass)
        room = torch.where(point, 1.0, (1 - of_parent(nodes, gone)).clamp(min=0))
        rest = torch.where(point, torch.where(twin, 0.0, nodes.p), nodes.p - c * nodes.q)
        accepts = (nodes.coin * (nodes.q * z).float() < (rest * room).float()) & (nodes.p.float() > 0)
        accepts = accepts & (nodes.q.float() > 0)
        passes = passes | (tested & accepts)
        tried = tried | (tested & ~accepts)
        scale = _to_rows(nodes, tested, torch.where(room > 0, c + z / room.clamp(min=1e-300), c), scale)
        if not replacement:
            gone = _to_rows(nodes, tested & ~point, of_parent(nodes, gone) + nodes.q, gone)
        # Nodes with r + 2 children or more need the mass; no tree has more of them than this.
        count = (nodes.nodes - 1) // (r + 2)
        if r == rounds - 1 or count == 0:
            break
        rows = (children >= r + 2).int().argsort(dim=1, descending=True, stable=True)[:, :count]
        p, q = nodes.probs(rows)
        by_scale = (p - scale.gather(1, rows).flatten()[:, None] * q).clamp(min=0).sum(1)
        by_mask = torch.where(nodes.marked(rows, tried | passes), 0.0, p).sum(1)
        (left,) = nodes.shards.sum(torch.where(point.expand_as(rows).flatten(), by_mask, by_scale).view(rows.shape))
        was_tested = _to_rows(nodes, tested, torch.ones_like(mass), torch.zeros_like(mass)).gather(1, rows) > 0
        mass = mass.scatter(1, rows, torch.where(was_tested, left, mass.gather(1, rows)))
    stand, status = descend(nodes, passes, max_depth, faults, status, in_order=True)
    return finish(nodes, stand, tried, at(scale, stand), status)


def _to_rows(nodes: Nodes, which: Tensor, values: Tensor, otherwise: Tensor) -> Tensor:
    """Values [batch, nodes] of at most one candidate a row, put into its row."""
    row = torch.where(which, nodes.above, nodes.nodes)
    return torch.nn.functional.pad(otherwise, (0, 1)).scatter(1, row, values)[:, :-1]


class _Traversal:
    """Current numbers of every node; the rows of p and q are this rank's part."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        p, q = nodes.probs(nodes.every)
        shape = (nodes.batch, nodes.nodes, -1)
        self.p_row, self.q_row = p.view(shape), q.view(shape)
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
        mass, q_left = nodes.shards.sum(excess.sum(1), q_row.sum(1))
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
    """Leaves first, in depth-first order; see the reference for the rule."""
    now = _Traversal(nodes)
    alive, status = _examine(now, status)
    stand = torch.zeros_like(nodes.request)
    running = torch.ones_like(stand, dtype=torch.bool)
    for deleted in range(nodes.nodes):
        leaf, above = torch.zeros_like(stand), torch.zeros_like(stand)
        weight = at(now.fixed, leaf)
        weight_above = weight
        for _ in range(max_depth):
            child, descends = first((nodes.tree.parents == leaf[:, None]) & alive)
            below = now.child_weight(weight, child)
            above, weight_above = torch.where(descends, leaf, above), torch.where(descends, weight, weight_above)
            leaf, weight = torch.where(descends, child, leaf), torch.where(descends, below, weight)
        accepted = running & ((leaf == 0) | (at(nodes.coin, leaf) < weight.float()))
        stand = torch.where(accepted, leaf, stand)
        running = running & ~accepted
        if deleted == nodes.nodes - 1:
            break  # the root alone was left
        now.delete(above, weight_above, leaf, running)
        alive = alive & ~(running[:, None] & (nodes.tree.node == leaf[:, None]))

    tried = now.tried & (nodes.tree.parents == stand[:, None])
    point = ~nodes.has_draft_row
    weight = now.p_row[nodes.request, stand].float()
    plain, left, _ = nodes.race(stand[:, None], RESIDUAL_PURPOSE, weight, tried, point)
    left = left._replace(empty=left.empty | (at(now.is_empty, stand) & ~point)[:, None])
    return choose(stand, plain, left, at(now.is_fixed, stand), status)
