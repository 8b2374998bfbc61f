"""The rules that go down from the root, each spelled plainly: (where the walk ends, what is left to draw from, status).

p is the distribution of the node's target row, q that of its draft row, x a candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _rows
from ..._codes import RESIDUAL_PURPOSE, Status
from .call import Call, Correction, at, first, flag

Walk = tuple[Tensor, Correction, Tensor]


def _root(call: Call) -> tuple[Tensor, Tensor]:
    """(node where the walk stands, whether it still walks)."""
    return torch.zeros_like(call.slot), torch.ones_like(call.slot, dtype=torch.bool)


def match(call: Call, max_depth: int, purpose: int, status: Tensor) -> Walk:
    """One token is drawn at each node; the child that carries it is accepted. A greedy row draws its argmax."""
    stand, walking = _root(call)
    for _ in range(max_depth):
        children = call.children(stand) & walking[:, None]
        status = flag(status, (children & call.outside).any(1), Status.BAD_ID)
        row = call.target_distribution(stand)
        status = flag(status, children.any(1) & row.bad, Status.BAD_TARGET)
        token = _rows.plain_draw(row, call.noise(stand, purpose))
        child, walking = first(children & call.usable & (call.ids == token[:, None]) & ~row.bad[:, None])
        stand = torch.where(walking, child, stand)
    return stand, call.nothing_rejected(), status


def target_only(call: Call, max_depth: int, status: Tensor) -> Walk:
    """One coin a node: the first child x_j with coin < p(x_1) + ... + p(x_j) is accepted; else p without children."""
    stand, walking = _root(call)
    left = call.nothing_rejected()
    for _ in range(max_depth):
        children = call.children(stand) & walking[:, None]
        status = flag(status, (children & call.outside).any(1), Status.BAD_ID)
        row = call.target_distribution(stand)
        status = flag(status, children.any(1) & row.bad, Status.BAD_TARGET)
        candidates = children & call.usable & ~row.bad[:, None]
        p = row.probs().gather(1, torch.where(candidates, call.ids, 0))
        p = torch.where(candidates, p, 0.0)
        hit = candidates & (p.float() > 0) & (call.children_coin(stand)[:, None] < p.cumsum(1).float())
        child, passes = first(hit)
        stopped = candidates.any(1) & ~passes
        left = left._replace(
            rejected=left.rejected | stopped, tried=left.tried | (call.marked(candidates) & stopped[:, None])
        )
        stand, walking = torch.where(passes, child, stand), passes
    return stand, left, status


def typical(call: Call, status: Tensor) -> Walk:
    """Accepts x iff p(x) > min(epsilon, delta exp(-H(p))); the deepest accepted node, then the likeliest path."""
    alive = [torch.ones_like(call.slot, dtype=torch.bool)]
    score = [torch.zeros(call.batch, dtype=torch.float64, device=call.ids.device)]
    for n in range(1, call.nodes):
        parent = call.tree.parents[:, n]
        node = parent.clamp(min=0)
        here = (parent >= 0) & at(torch.stack(alive, 1), node)
        status = flag(status, here & call.outside[:, n], Status.BAD_ID)
        row = call.target_distribution(node)
        status = flag(status, here & row.bad, Status.BAD_TARGET)
        probs = row.probs()
        entropy = -torch.special.xlogy(probs, probs).sum(1)
        p = at(probs, call.candidate(torch.full_like(call.slot, n)))
        limit = torch.full_like(p, call.given.typical_epsilon).minimum(call.given.typical_delta * (-entropy).exp())
        passes = (p > 0) & (p > limit)
        alive.append(here & call.usable[:, n] & ~row.bad & passes)
        score.append(at(torch.stack(score, 1), node) + p.clamp(min=1e-300).log())
    accepted, scores = torch.stack(alive, 1), torch.stack(score, 1)
    depth = torch.where(accepted, call.tree.depth, -1)
    deepest = accepted & (depth == depth.amax(1, keepdim=True))
    best = torch.where(deepest, scores, -torch.inf)
    stand, _ = first(deepest & (best == best.amax(1, keepdim=True)))
    return stand, call.nothing_rejected(), status


def recursive(call: Call, status: Tensor) -> Walk:
    """Recursive rejection: children are tried in turn, each against what the rejections before it left of p and q.

    Scalar form. Before the first child of a node C = 0, Z = 1, Q = 0. Child x is accepted iff
    u q(x) Z < (p(x) - C q(x)) (1 - Q); else C += Z / (1 - Q), Z = sum (p - C q)+, and without replacement Q += q(x).
    In the end (p - C q)+ is left. Where q is a point mass at each child: accepted iff u Z < p(x), Z = mass of p
    without the rejected ids. One pass in node order: a node is tried iff its parent is where the walk stands.
    """
    stand, _ = _root(call)
    fresh = call.nothing_rejected()
    zero, one = torch.zeros_like(fresh.scale), torch.ones_like(fresh.scale)
    left, mass, gone = fresh, one, zero
    for n in range(1, call.nodes):
        node = torch.full_like(call.slot, n)
        here = call.tree.parents[:, n] == stand
        status = flag(status, here & call.outside[:, n], Status.BAD_ID)
        row = call.target_distribution(stand)
        status = flag(status, here & row.bad, Status.BAD_TARGET)
        tested = here & call.usable[:, n] & ~row.bad
        x = call.candidate(node)
        q, bad = call.draft_probs(stand, x)
        status = flag(status, tested & bad, Status.BAD_DRAFT)
        tested = tested & ~bad
        probs = row.probs()
        px, qx = at(probs, x), at(q, x)
        status = flag(status, tested & (qx.float() == 0), Status.ZERO_DRAFT)

        point = ~call.has_draft_row
        room = torch.where(point, 1.0, (1 - gone).clamp(min=0))
        rest = torch.where(point, torch.where(at(left.tried, x), 0.0, px), px - left.scale * qx)
        passes = (call.coin(node) * (qx * mass).float() < (rest * room).float()) & (px.float() > 0) & (qx.float() > 0)

        rejected = tested & ~passes
        scale = torch.where(room > 0, left.scale + mass / room.clamp(min=1e-300), left.scale)
        tried = left.tried | torch.nn.functional.one_hot(x, call.vocab).bool()
        by_scale = (probs - scale[:, None] * q).clamp(min=0).sum(1)
        by_mask = torch.where(tried, 0.0, probs).sum(1)
        mass = torch.where(rejected, torch.where(point, by_mask, by_scale), mass)
        gone = torch.where(rejected & ~point & (not call.given.replacement), gone + qx, gone)
        left = Correction(
            left.rejected | rejected,
            torch.where(rejected, scale, left.scale),
            left.hidden,
            torch.where(rejected[:, None], tried, left.tried),
        )
        moves = tested & passes
        stand = torch.where(moves, n, stand)
        mass, gone = torch.where(moves, one, mass), torch.where(moves, zero, gone)
        left = _restart(left, fresh, moves)
    return stand, left, status


def _restart(left: Correction, fresh: Correction, moves: Tensor) -> Correction:
    """The correction of a new node where the walk moved."""
    choose = (torch.where(moves.view(-1, *[1] * (a.dim() - 1)), b, a) for a, b in zip(left, fresh, strict=True))
    return Correction(*choose)


def greedy_multi_draft(call: Call, max_depth: int, status: Tensor) -> Walk:
    """The last child X was drawn from q without the other children S0, which are deterministic.

    X is accepted iff u q'(X) < p(X), q' = q without S0, normalised. Else y from norm((p - q')+); y in S0 is accepted.
    """
    stand, walking = _root(call)
    left = call.nothing_rejected()
    for _ in range(max_depth):
        children = call.children(stand) & walking[:, None]
        status = flag(status, (children & call.outside).any(1), Status.BAD_ID)
        row = call.target_distribution(stand)
        status = flag(status, children.any(1) & row.bad, Status.BAD_TARGET)
        children = children & ~row.bad[:, None]
        drawn = torch.where(children, call.tree.node, 0).amax(1)
        others = children & call.usable & (call.tree.node != drawn[:, None])
        tested = children.any(1) & at(call.usable, drawn)

        x = call.candidate(drawn)
        q, bad = call.draft_probs(stand, x)
        status = flag(status, tested & bad, Status.BAD_DRAFT)
        children, others, tested = children & ~bad[:, None], others & ~bad[:, None], tested & ~bad
        hidden = call.marked(others) & call.has_draft_row[:, None]
        room = 1 - torch.where(hidden, q, 0.0).sum(1)
        scale = torch.where(room > 0, 1 / room.clamp(min=1e-300), 0.0)
        q = torch.where(hidden, 0.0, q)
        px, qx = at(row.probs(), x).float(), (scale * at(q, x)).float()
        status = flag(status, tested & (qx == 0), Status.ZERO_DRAFT)
        passes = tested & (px > 0) & (qx > 0) & (call.coin(drawn) * qx < px)

        tried = torch.nn.functional.one_hot(x, call.vocab).bool()
        here = Correction(tested & ~passes, scale, hidden, tried)
        token, empty = call.draw(stand, here, RESIDUAL_PURPOSE)
        status = flag(status, empty & here.rejected, Status.EMPTY_RESIDUAL)
        other, is_other = first(others & (call.ids == token[:, None]) & ~passes[:, None])
        left = _restart(left, here, walking)
        stand = torch.where(passes, drawn, torch.where(is_other, other, stand))
        walking = passes | is_other
        left = _restart(left, call.nothing_rejected(), walking)
    return stand, left, status
