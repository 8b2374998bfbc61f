"""verify_chain, spelled plainly: which drafted ids pass, how far the walk comes, then one token. The definition.

A chain is a tree without branches: node i is draft i, row i the distribution of the id behind it. The rules that trees
know too are in `_walks`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ... import _chains, _rows, _trees, _walks
from ..._codes import CHAIN_RULES, RESIDUAL_PURPOSE, Status
from ..._edited import NO_TOP, Layout, nothing_listed, with_rows
from ..._edits import Edits
from ..._nodes import Drafted, Nodes, at
from ..._scores import list_tokens, score
from ..._types import ChainArguments, Kept
from ..._vocabulary import Vocabulary, added
from ..._walks import End, choose, descend, finish, flag, of_parent, testable


def verify_chain(
    given: ChainArguments, *, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `specdec_kernels.verify_chain`; a part of a `vocabulary` takes 2 exchanges, 4 with filters."""
    vocabulary = vocabulary or Vocabulary(given.target_logits.shape[-1])
    rule, max_draft, mode = tuple(CHAIN_RULES)[given.rule], given.max_draft, given.logprobs_mode
    chains = _chains.chains(*given[:3], given.cu_draft, max_draft)
    status = torch.where(chains.bad, Status.BAD_LAYOUT, 0)
    has_drafts = None if given.draft_logits is None else chains.has_drafts(vocabulary.size)
    target, draft, processed, status = _walks.prepare(given, rule, has_drafts, status)
    row = torch.arange(max_draft + 1, device=status.device)
    drafted = None
    if rule in _walks.DRAFT_RULES and chains.has_draft_rows() and max_draft:
        rows, stats = chains.draft_rows(max_draft), None
        if given.draft_logsumexp is not None and given.draft_threshold is not None:
            stats = (
                chains.draft_rows(max_draft, given.draft_logsumexp),
                chains.draft_rows(max_draft, given.draft_threshold),
            )
        draft_edits = given.draft_edits.pick(lambda table: chains.of_target_rows(table, max_draft + 1, max_draft))
        kept = Kept(*(None if part is None else chains.draft_rows(max_draft, part) for part in given.draft_kept))
        drafted = Drafted(rows, draft, stats, draft_edits, kept)
    bits = None if given.allowed is None else chains.of_target_rows(given.allowed, max_draft + 1)
    edits = given.edits.pick(lambda table: chains.of_target_rows(table, max_draft + 1))
    ids = torch.nn.functional.pad(chains.ids, (1, 0), value=-1)
    tree = _trees.tree((row - 1).expand(len(status), -1), max_draft)
    nodes = Nodes(
        vocabulary, given, tree, ids, chains.target_rows(max_draft + 1), target, drafted, bits, edits,
        _walks.scored_by(rule, processed, mode),
    )  # fmt: skip
    silent = chains.lost
    if rule == "block":
        end, bonus_bad = block(nodes, chains.lost, status)
        silent = silent | bonus_bad
    else:
        end = _walk_chain(nodes, given, rule, status)
        bad = at(nodes.bad, end.last)
        end = end._replace(status=flag(end.status, bad, Status.BAD_TARGET))
        silent = silent | bad
    # Of a request that is lost nothing but its layout was looked at.
    seen = Status.BAD_LAYOUT | Status.BAD_SAMPLING
    status = torch.where(chains.lost, end.status & seen, end.status)
    tokens, _, accepted, logprobs = _walks.result(nodes, end, silent, max_draft, mode)
    return (
        _rows.of_active(given.sampling, tokens.to(given.draft_ids.dtype), -1),
        _rows.of_active(given.sampling, accepted.int()),
        _rows.of_active(given.sampling, status.int()),
        _rows.of_active(given.sampling, logprobs),
    )


def verify_chain_listed(
    top: int, given: ChainArguments, *, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same with `top`: the results of `verify_chain`, then ranks, top_ids and top_logprobs of its tokens."""
    decided = verify_chain(given, vocabulary=vocabulary)
    return *decided, *list_tokens(partial(score, vocabulary), given, top, decided)


def verify_chain_edited(
    top: int, wanted_edits: Edits, are_of_drafts: bool, given: ChainArguments
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same with `Edits` of requests in place of those of rows; listed where `top` is not negative."""
    layout = Layout(given.draft_ids, None, given.cu_draft, given.max_draft)
    given = with_rows(given, wanted_edits, are_of_drafts, layout)
    if top != NO_TOP:
        return verify_chain_listed(top, given)
    return *verify_chain(given), *nothing_listed(given.draft_ids)


def _walk_chain(nodes: Nodes, given: ChainArguments, rule: str, status: Tensor) -> End:
    if rule == "ratio":
        return ratio(nodes, given, status)
    if rule == "typical":
        return _walks.typical(nodes, given.typical, status)
    if rule == "match":
        return _walks.match(nodes, given.max_draft, status)
    near = None
    if rule != "greedy":
        near = stern(nodes, rule, given.top_m, given.max_distance, given.min_block)
    return _walks.argmax(nodes, given.max_draft, status, near)


def ratio(nodes: Nodes, given: ChainArguments, status: Tensor) -> End:
    """A chain: x passes iff u q(x) < p(x) + over_acceptance."""
    fine, faults = testable(nodes, True)
    p, q = nodes.p.float(), nodes.q.float()
    extra = _walks.knob(given.over_acceptance, given.over_acceptances)
    passes = fine & (p > 0) & (q > 0) & (nodes.coin * q < p + extra)
    last, status = descend(nodes, passes, given.max_draft, faults, status, in_order=True)
    whole, from_target = torch.ones_like(nodes.p[:, 0]), given.rejected_from_target
    return finish(nodes, last, fine & ~passes, whole, status, from_target=from_target)


def stern(nodes: Nodes, rule: str, top_m: int, max_distance: int, min_block: int) -> Tensor:
    """Rules `topm` and `distance` of a chain: candidates near the argmax, and the first min_block - 1 anyway."""
    if rule == "topm":
        raw = nodes.distribution.logits.unflatten(0, (nodes.batch, nodes.nodes))[nodes.request[:, None], nodes.above]
        logit, ids = nodes.p_logit[:, :, None], nodes.vocabulary.columns(raw.device)
        before = (raw > logit) | ((raw == logit) & (ids < nodes.x[:, :, None]))
        (rank,) = nodes.vocabulary.sum((before & (ids < nodes.vocabulary.end)).sum(2))
        near = rank < top_m
    else:
        near = (nodes.ids - of_parent(nodes, nodes.argmax)).abs() <= max_distance
    return nodes.p_logit.isfinite() & (near | (nodes.tree.node < min_block))


def block(nodes: Nodes, lost: Tensor, status: Tensor) -> tuple[End, Tensor]:
    """(end, requests whose bonus row is bad). The masses S travel with the draws of all rows.

    w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)), S_i = sum (w_i p - q)+, h_i = S_i / (S_i + 1 - w_i), h_K = w_K;
    accepted are tau = max{i: coin_i < h_i} ids, and then the draw is from norm((w_tau p - q)+).
    """
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
    points = point[:, None].expand_as(w).flatten()[:, None]
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
