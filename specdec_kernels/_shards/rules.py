"""Rules of chains and trees over the exchanged numbers: where the walk stands, the token after it, status.

The rules are those of the references; here whether a candidate passes is decided for all of them at once, as if the
walk came by, and the walk then follows those that pass. `tried` marks candidates whose rejection counts in the draw.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._codes import RESIDUAL_PURPOSE, TARGET_PURPOSE, Status
from .group import added
from .nodes import Draw, Nodes, at


class End(NamedTuple):
    """Where a walk ends."""

    stand: Tensor  # int64 [batch]: the last accepted node
    token: Tensor  # int64 [batch]: drawn after it
    logit: Tensor  # float32 [batch], of the token
    status: Tensor


def first(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest marked node or 0, whether there is one) of each request."""
    return mask.int().argmax(1), mask.any(1)


def flag(status: Tensor, where: Tensor, bit: int) -> Tensor:
    """Status with a bit set."""
    return status | torch.where(where, bit, 0)


def of_parent(nodes: Nodes, rows: Tensor) -> Tensor:
    """Entry of each candidate's row."""
    return rows.gather(1, nodes.above)


def testable(nodes: Nodes, reads_draft: bool) -> tuple[Tensor, list[tuple[Tensor, int]]]:
    """(candidates that can be tested, what is wrong with the others as status bits), each [batch, nodes]."""
    bad = of_parent(nodes, nodes.bad)
    fine = nodes.usable & ~bad
    faults: list[tuple[Tensor, int]] = [(nodes.outside, Status.BAD_ID), (bad, Status.BAD_TARGET)]
    if reads_draft:
        faults.append((fine & nodes.bad_draft, Status.BAD_DRAFT))
        fine = fine & ~nodes.bad_draft
        faults.append((fine & (nodes.q.float() == 0), Status.ZERO_DRAFT))
    return fine, faults


def descend(
    nodes: Nodes, passes: Tensor, max_depth: int, faults: list[tuple[Tensor, int]], status: Tensor, *, in_order: bool
) -> tuple[Tensor, Tensor]:
    """(node where the walk ends, status); with `in_order` candidates behind the accepted one were not looked at."""
    stand = torch.zeros_like(nodes.request)
    walking = torch.ones_like(stand, dtype=torch.bool)
    for _ in range(max_depth):
        children = (nodes.tree.parents == stand[:, None]) & walking[:, None]
        child, walking = first(children & passes)
        if in_order:
            children = children & ((nodes.tree.node <= child[:, None]) | ~walking[:, None])
        for mask, bit in faults:
            status = flag(status, (children & mask).any(1), bit)
        stand = torch.where(walking, child, stand)
    return stand, status


def finish(
    nodes: Nodes, stand: Tensor, tried: Tensor, scale: Tensor, status: Tensor, *, from_target: bool = False,
    excludes: bool = False,
) -> End:  # fmt: skip
    """Draw after `stand`: from (p - scale q)+, or p without `tried` where the draft is a point mass."""
    rows = stand[:, None]
    p, q = nodes.probs(rows)
    weight = torch.where(nodes.distributions(rows).kept, p.float() - (scale[:, None] * q).float(), 0.0)
    point = torch.ones_like(nodes.has_draft_row) if excludes else ~nodes.has_draft_row
    tried = tried & (nodes.tree.parents == rows)
    stats = nodes.drafted is not None and nodes.drafted.stats is not None
    more = (nodes.draft_maximum(rows),) if stats else ()
    plain, left, got = nodes.race(rows, RESIDUAL_PURPOSE, weight, tried, point, more)
    rejected = tried.any(1) & (not from_target)
    if stats:  # a bad row that was read only now ends the draft, as if it had not been proposed
        late = rejected & nodes.has_draft_row & ~got[0].amax(0)[:, 0].isfinite()
        status = flag(status, late, Status.BAD_DRAFT)
        rejected = rejected & ~late
    return choose(stand, plain, left, rejected, status)


def choose(stand: Tensor, plain: Draw, left: Draw, rejected: Tensor, status: Tensor) -> End:
    """The draw that counts; where nothing is left it is the one from p."""
    empty = left.empty[:, 0]
    status = flag(status, rejected & empty, Status.EMPTY_RESIDUAL)
    corrected = rejected & ~empty
    token = torch.where(corrected, left.token[:, 0], plain.token[:, 0])
    return End(stand, token, torch.where(corrected, left.logit[:, 0], plain.logit[:, 0]), status)


def match(nodes: Nodes, max_depth: int, status: Tensor) -> End:
    """The candidate that carries the draw of its parent's row passes; all rows are drawn in one exchange."""
    drawn, _, _ = nodes.race(nodes.every, TARGET_PURPOSE)
    fine, faults = testable(nodes, False)
    passes = fine & (nodes.ids == of_parent(nodes, drawn.token))
    stand, status = descend(nodes, passes, max_depth, faults, status, in_order=False)
    return End(stand, at(drawn.token, stand), at(drawn.logit, stand), status)


def argmax(nodes: Nodes, max_depth: int, status: Tensor, near: Tensor | None = None) -> End:
    """Rules of argmax decoding: `near` bool [batch, nodes] passes, by default the argmax itself."""
    fine, faults = testable(nodes, False)
    near = nodes.ids == of_parent(nodes, nodes.argmax) if near is None else near
    stand, status = descend(nodes, fine & near, max_depth, faults, status, in_order=False)
    maximum = at(nodes.distribution.maximum.view(nodes.batch, -1), stand)
    return End(stand, at(nodes.argmax, stand), maximum, status)


def stern(nodes: Nodes, rule: str, top_m: int, max_distance: int, min_block: int) -> Tensor:
    """Rules `topm` and `distance` of a chain: candidates near the argmax, and the first min_block - 1 anyway."""
    if rule == "topm":
        raw = nodes.distribution.logits.view(nodes.batch, nodes.nodes, -1)[nodes.request[:, None], nodes.above]
        logit, ids = nodes.p_logit[:, :, None], nodes.shards.columns(raw.device)
        before = (raw > logit) | ((raw == logit) & (ids < nodes.x[:, :, None]))
        (rank,) = nodes.shards.sum((before & (ids < nodes.shards.end)).sum(2))
        near = rank < top_m
    else:
        near = (nodes.ids - of_parent(nodes, nodes.argmax)).abs() <= max_distance
    return nodes.p_logit.isfinite() & (near | (nodes.tree.node < min_block))


def ratio(nodes: Nodes, max_depth: int, over_acceptance: float, from_target: bool, status: Tensor) -> End:
    """A chain: x passes iff u q(x) < p(x) + over_acceptance."""
    fine, faults = testable(nodes, True)
    p, q = nodes.p.float(), nodes.q.float()
    passes = fine & (p > 0) & (q > 0) & (nodes.coin * q < p + over_acceptance)
    stand, status = descend(nodes, passes, max_depth, faults, status, in_order=True)
    return finish(nodes, stand, fine & ~passes, torch.ones_like(nodes.p[:, 0]), status, from_target=from_target)


def typical(nodes: Nodes, epsilon: float, delta: float, status: Tensor) -> End:
    """Passes iff p(x) > min(epsilon, delta exp(-H(p))); the deepest node, then the likeliest path, then the lower."""
    p, _ = nodes.probs(nodes.every)
    entropy = -torch.special.xlogy(p, p).sum(1).view(nodes.batch, -1)
    drawn, _, got = nodes.race(nodes.every, RESIDUAL_PURPOSE, more=(entropy,))
    limit = of_parent(nodes, delta * (-added(got[0])).exp()).clamp(max=epsilon)
    fine, faults = testable(nodes, False)
    passes = fine & (nodes.p > 0) & (nodes.p > limit)
    # A node is accepted iff it and all its ancestors but the root pass; it is looked at iff its parent is accepted.
    misses = (nodes.tree.present & ~passes & (nodes.tree.node > 0))[:, None, :]
    alive = nodes.tree.present & ~(nodes.tree.ancestors & misses).any(2)
    looked_at = (nodes.tree.parents >= 0) & of_parent(nodes, alive)
    for mask, bit in faults:
        status = flag(status, (looked_at & mask).any(1), bit)
    gain = torch.where(nodes.tree.node > 0, nodes.p.clamp(min=1e-300).log(), 0.0)
    score = torch.zeros_like(gain)
    for n in range(1, nodes.nodes):  # from the root on, as the reference adds
        score[:, n] = score.gather(1, nodes.above[:, n : n + 1]).squeeze(1) + gain[:, n]
    depth = torch.where(alive, nodes.tree.depth, -1)
    deepest = alive & (depth == depth.amax(1, keepdim=True))
    best = torch.where(deepest, score, -torch.inf)
    stand, _ = first(deepest & (best == best.amax(1, keepdim=True)))
    return End(stand, at(drawn.token, stand), at(drawn.logit, stand), status)


def target_only(nodes: Nodes, max_depth: int, status: Tensor) -> End:
    """One coin a node: the first child x_j with coin < p(x_1) + ... + p(x_j); else p without the children."""
    fine, faults = testable(nodes, False)
    siblings = (nodes.tree.parents[:, :, None] == nodes.tree.parents[:, None, :]) & fine[:, None, :]
    upto = siblings & (nodes.tree.node <= nodes.tree.node[:, None])
    total = torch.where(upto, nodes.p[:, None, :], 0.0).cumsum(2)[:, :, -1].float()
    passes = fine & (nodes.p.float() > 0) & (of_parent(nodes, nodes.children_coin) < total)
    stand, status = descend(nodes, passes, max_depth, faults, status, in_order=False)
    return finish(nodes, stand, fine, torch.ones_like(nodes.p[:, 0]), status, excludes=True)


def greedy_multi_draft(nodes: Nodes, max_depth: int, status: Tensor) -> End:
    """The last child X was drawn from q without the others S0; after its rejection a draw that is in S0 is accepted."""
    children = nodes.tree.parents[:, None, :] == nodes.tree.node[:, None]  # [batch, row, child]
    drawn = torch.where(children, nodes.tree.node, 0).amax(2)
    is_last = (nodes.tree.parents >= 0) & (of_parent(nodes, drawn) == nodes.tree.node)
    fine, faults = testable(nodes, False)
    bad_draft = (children & (fine & nodes.bad_draft)[:, None, :]).any(2)
    tested = fine & is_last
    faults.append((tested & nodes.bad_draft, Status.BAD_DRAFT))
    tested = tested & ~nodes.bad_draft
    others = fine & ~is_last & ~of_parent(nodes, bad_draft)

    point = ~nodes.has_draft_row
    hidden = others & ~point[:, None]
    room = 1 - torch.where(children & hidden[:, None, :], nodes.q[:, None, :], 0.0).sum(2)
    scale = torch.where(room > 0, 1 / room.clamp(min=1e-300), 0.0)
    px, qx = nodes.p.float(), (of_parent(nodes, scale) * nodes.q).float()
    faults.append((tested & (qx == 0), Status.ZERO_DRAFT))
    accepted = tested & (px > 0) & (qx > 0) & (nodes.coin * qx < px)

    tried = tested & ~accepted
    p, q = nodes.probs(nodes.every)
    q = torch.where(nodes.marked(nodes.every, hidden), 0.0, q)
    weight = p.float() - (scale.flatten()[:, None] * q).float()
    weight = torch.where(nodes.distribution.kept, weight, 0.0)
    plain, left, _ = nodes.race(nodes.every, RESIDUAL_PURPOSE, weight, tried, point)
    rejected = (children & tried[:, None, :]).any(2)
    empty = rejected & left.empty
    corrected = rejected & ~left.empty
    token = torch.where(corrected, left.token, plain.token)
    logit = torch.where(corrected, left.logit, plain.logit)
    faults.append((of_parent(nodes, empty), Status.EMPTY_RESIDUAL))
    open_rows = ~(children & accepted[:, None, :]).any(2)
    passes = accepted | (others & of_parent(nodes, open_rows) & (nodes.ids == of_parent(nodes, token)))
    stand, status = descend(nodes, passes, max_depth, faults, status, in_order=False)
    return End(stand, at(token, stand), at(logit, stand), status)
