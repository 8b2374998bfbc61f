"""Walks that chains and trees share, over the numbers of `_nodes`: where a walk stands, the token after it, status.

Whether a candidate passes is decided for all of them at once, as if the walk came by; the walk then follows those that
pass. So all rows are looked at in one exchange of the vocabulary. `tried` marks candidates whose rejection counts in
the draw.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _rows, _trees
from ._codes import NO_LOGPROBS, PROCESSED_LOGPROBS, RAW_LOGPROBS, RESIDUAL_PURPOSE, TARGET_PURPOSE, Status
from ._nodes import Draw, Nodes, at
from ._rows import Parameters
from ._types import ChainArguments, Sampling, TreeArguments, Typical
from ._vocabulary import added

ARGMAX_RULES = ("greedy", "topm", "distance")
DRAFT_RULES = ("ratio", "block", "recursive", "greedy_multi_draft", "traversal")


def prepare(
    given: ChainArguments | TreeArguments, rule: str, has_drafts: Tensor | None, status: Tensor
) -> tuple[Parameters, Parameters, Parameters, Tensor]:
    """(target's parameters, the draft's, those of processed log-probabilities, status).

    `has_drafts` is bool [batch]: whether a request has a drafted id to examine; None where there are no draft rows.
    """
    batch, device = len(status), status.device
    sampled = _rows.parameters(batch, device, given.sampling)
    drafted = _rows.parameters(batch, device, given.draft_sampling)
    if rule in ARGMAX_RULES:  # argmax decoding reads no sampling parameter
        processed = _rows.parameters(batch, device, Sampling())
        return processed._replace(greedy=torch.ones_like(processed.greedy)), drafted, processed, status
    bad = sampled.bad
    if has_drafts is not None and rule in DRAFT_RULES:
        bad = bad | (drafted.bad & ~sampled.greedy & has_drafts)
    return sampled, drafted, sampled, flag(status, bad, Status.BAD_SAMPLING)


def scored_by(rule: str, processed: Parameters, mode: int) -> Parameters | None:
    """Parameters of the distribution of log-probabilities where it is another than the one that is verified."""
    plain = _rows.parameters(len(processed.greedy), processed.greedy.device, Sampling())
    return plain if mode == RAW_LOGPROBS or (mode == PROCESSED_LOGPROBS and rule in ARGMAX_RULES) else None


class End(NamedTuple):
    """Where a walk ends."""

    last: Tensor  # int64 [batch]: the last accepted node
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
    last = torch.zeros_like(nodes.request)
    walking = torch.ones_like(last, dtype=torch.bool)
    for _ in range(max_depth):
        children = (nodes.tree.parents == last[:, None]) & walking[:, None]
        child, walking = first(children & passes)
        if in_order:
            children = children & ((nodes.tree.node <= child[:, None]) | ~walking[:, None])
        for mask, bit in faults:
            status = flag(status, (children & mask).any(1), bit)
        last = torch.where(walking, child, last)
    return last, status


def finish(
    nodes: Nodes, last: Tensor, tried: Tensor, scale: Tensor, status: Tensor, *, from_target: bool = False,
    excludes: bool = False,
) -> End:  # fmt: skip
    """Draw after `last`: from (p - scale q)+, or p without `tried` where the draft is a point mass."""
    rows = last[:, None]
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
    return choose(last, plain, left, rejected, status)


def choose(last: Tensor, plain: Draw, left: Draw, rejected: Tensor, status: Tensor) -> End:
    """The draw that counts; where nothing is left it is the one from p."""
    empty = left.empty[:, 0]
    status = flag(status, rejected & empty, Status.EMPTY_RESIDUAL)
    corrected = rejected & ~empty
    token = torch.where(corrected, left.token[:, 0], plain.token[:, 0])
    return End(last, token, torch.where(corrected, left.logit[:, 0], plain.logit[:, 0]), status)


def match(nodes: Nodes, max_depth: int, status: Tensor) -> End:
    """The candidate that carries the draw of its parent's row passes; all rows are drawn in one exchange."""
    drawn, _, _ = nodes.race(nodes.every, TARGET_PURPOSE)
    fine, faults = testable(nodes, False)
    passes = fine & (nodes.ids == of_parent(nodes, drawn.token))
    last, status = descend(nodes, passes, max_depth, faults, status, in_order=False)
    return End(last, at(drawn.token, last), at(drawn.logit, last), status)


def argmax(nodes: Nodes, max_depth: int, status: Tensor, near: Tensor | None = None) -> End:
    """Rules of argmax decoding: `near` bool [batch, nodes] passes, by default the argmax itself."""
    fine, faults = testable(nodes, False)
    near = nodes.ids == of_parent(nodes, nodes.argmax) if near is None else near
    last, status = descend(nodes, fine & near, max_depth, faults, status, in_order=False)
    token = at(nodes.argmax, last)
    return End(last, token, nodes.argmax_logit(last, token), status)


def knob(value: float, each: Tensor | None) -> Tensor | float:
    """A parameter of a rule beside candidates [batch, nodes]: of all requests, or of each."""
    return value if each is None else each[:, None]


def typical(nodes: Nodes, given: Typical, status: Tensor) -> End:
    """Passes iff p(x) > min(epsilon, delta exp(-H(p))); the deepest node, then the likeliest path, then the lower."""
    p, _ = nodes.probs(nodes.every)
    entropy = -torch.special.xlogy(p, p).sum(1).view(nodes.batch, nodes.nodes)
    drawn, _, got = nodes.race(nodes.every, RESIDUAL_PURPOSE, more=(entropy,))
    epsilon = torch.as_tensor(knob(given.typical_epsilon, given.typical_epsilons), device=p.device)
    limit = knob(given.typical_delta, given.typical_deltas) * of_parent(nodes, (-added(got[0])).exp())
    limit = torch.minimum(limit, epsilon)
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
    for n in range(1, nodes.nodes):  # from the root on
        score[:, n] = score.gather(1, nodes.above[:, n : n + 1]).squeeze(1) + gain[:, n]
    depth = torch.where(alive, nodes.tree.depth, -1)
    deepest = alive & (depth == depth.amax(1, keepdim=True))
    best = torch.where(deepest, score, -torch.inf)
    last, _ = first(deepest & (best == best.amax(1, keepdim=True)))
    return End(last, at(drawn.token, last), at(drawn.logit, last), status)


def _logprobs(nodes: Nodes, path: Tensor, tokens: Tensor, end: End, mode: int) -> Tensor:
    """Log-probability of each emitted id under the row of the node before it; 0 where nothing was emitted."""
    if mode == NO_LOGPROBS:
        return torch.empty(0, device=tokens.device)
    following = torch.nn.functional.pad(path[:, 1:], (0, 1), value=-1)
    logit = nodes.x_logit.gather(1, following.clamp(min=0))
    logit = torch.where(following >= 0, logit, end.logit[:, None])
    rows = (nodes.request[:, None] * nodes.nodes + path.clamp(min=0)).flatten()
    logprob = nodes.scored.take(rows).logprob(logit.view(-1, 1)).view(tokens.shape)
    return torch.where(tokens >= 0, logprob, 0.0)


def result(
    nodes: Nodes, end: End, silent: Tensor, max_depth: int, mode: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(token_ids, path behind the root, num_accepted, logprobs); nothing is drawn for `silent` requests."""
    path = _trees.paths(nodes.tree, end.last[:, None], max_depth)[:, 0]
    accepted = at(nodes.tree.depth, end.last)
    column = torch.arange(max_depth + 1, device=path.device)
    following = torch.nn.functional.pad(path[:, 1:], (0, 1), value=-1)
    tokens = torch.where(following >= 0, nodes.ids.gather(1, following.clamp(min=0)), -1)
    tokens = torch.where((column == accepted[:, None]) & ~silent[:, None], end.token[:, None], tokens)
    return tokens, following, accepted, _logprobs(nodes, path, tokens, end, mode)
