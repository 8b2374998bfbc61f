"""verify_chain, spelled plainly: walk the draft, then draw one token. The definition of the op.

A request is walked position by position (`_walk`; rule `block` looks at all positions at once, `_walk_block`), which
gives the number of accepted ids and how the next token is drawn; `_emit` draws it from the one row that matters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _chains, _random, _rows
from ..._chains import Chains
from ..._codes import CHAIN_RULES, NO_LOGPROBS, PROCESSED_LOGPROBS, RESIDUAL_PURPOSE, TARGET_PURPOSE, Status
from ..._rows import Distribution, Parameters
from ..._types import ChainArguments, RngKey, Sampling

RATIO, BLOCK, MATCH, GREEDY, TYPICAL, TOPM, DISTANCE = CHAIN_RULES.values()
NOTHING, PLAIN, RESIDUAL = 0, 1, 2  # how the next token is drawn


class _Call:
    """Arguments of one call, prepared; distributions of the rows on demand."""

    def __init__(self, given: ChainArguments, chains: Chains, target: Parameters, draft: Parameters) -> None:
        self.given, self.chains, self.target, self.draft = given, chains, target, draft
        self.stats: tuple[Tensor, Tensor] | None = None
        if given.draft_logsumexp is not None and given.draft_threshold is not None:
            self.stats = (given.draft_logsumexp, given.draft_threshold)
        self.batch = chains.ids.shape[0]
        self.vocab = chains.target.shape[-1]
        # A greedy target never looks at the draft row: acceptance is equality with the argmax whatever q is.
        self.has_draft_row = ~(target.greedy | draft.greedy) & chains.has_draft_rows()

    def target_distribution(self, i: int | Tensor, parameter: Parameters | None = None) -> Distribution:
        allowed = None if self.given.allowed is None else self.chains.allowed_at(self.given.allowed, i)
        return _rows.distribution(self.chains.target_at(i), parameter or self.target, allowed)

    def draft_probs(self, i: int | Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(q over target ids float64 [batch, vocab], bad rows); a point mass at x where there is no draft row."""
        point = torch.nn.functional.one_hot(x.clamp(0, self.vocab - 1), self.vocab).double()
        if not self.chains.has_draft_rows():
            return point, torch.zeros_like(self.has_draft_row)
        row = self.chains.draft_at(i)
        distribution = _rows.distribution(row, self.draft)
        probs, bad = distribution.probs(), distribution.bad
        if self.stats is not None:
            logsumexp, threshold = (self.chains.draft_at(i, s) for s in self.stats)
            scaled = row.double() * distribution.inv_t.double()[:, None] - logsumexp.double()[:, None]
            probs = torch.where(row.float() >= threshold[:, None], scaled, -torch.inf).exp()
            bad = bad | ~logsumexp.isfinite()
        q = _rows.to_target_ids(probs, self.given.token_map, self.vocab)
        return torch.where(self.has_draft_row[:, None], q, point), bad & self.has_draft_row

    def draft_unreadable(self, i: int, x: Tensor) -> Tensor:
        """Rows the rule must not test: bad ones; with stats only what is seen without reading the row."""
        if self.stats is None or not self.chains.has_draft_rows():
            return self.draft_probs(i, x)[1]
        row = self.chains.draft_at(i)
        column = _column_of(x, self.given.token_map, row.shape[1])
        logit = row.gather(1, column.clamp(min=0)[:, None]).squeeze(1)
        unreadable = ~self.chains.draft_at(i, self.stats[0]).isfinite() | ((column >= 0) & logit.isnan())
        return unreadable & self.has_draft_row

    def coin(self, i: int) -> Tensor:
        return _random.coin(self._key(i))

    def noise(self, i: int | Tensor, purpose: int) -> Tensor:
        return _random.vocab_noise(self._key(i), purpose, None, self.vocab)

    def _key(self, i: int | Tensor) -> RngKey:
        return self.given.rng._replace(position=self.given.rng.position + i)


def _column_of(x: Tensor, token_map: Tensor | None, draft_vocab: int) -> Tensor:
    """Draft column of each target id, -1 where there is none."""
    if token_map is None:
        return torch.where(x < draft_vocab, x, -1)
    hit = token_map.long()[None, :] == x[:, None]
    return torch.where(hit.any(1), hit.int().argmax(1), -1)


def _at(values: Tensor, x: Tensor) -> Tensor:
    return values.gather(1, x[:, None]).squeeze(1)


def verify_chain(given: ChainArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.verify_chain`."""
    chains = _chains.chains(*given[:3], given.cu_draft, given.max_draft)
    batch, device, rule = chains.ids.shape[0], given.draft_ids.device, given.rule
    target = _rows.parameters(batch, device, given.sampling)
    draft = _rows.parameters(batch, device, given.draft_sampling)
    status = torch.where(chains.bad, Status.BAD_LAYOUT, 0)
    processed = target
    if rule in (GREEDY, TOPM, DISTANCE):  # argmax decoding reads no sampling parameter
        processed = _rows.parameters(batch, device, Sampling())
        target = processed._replace(greedy=torch.ones_like(processed.greedy))
    else:
        bad = target.bad
        if given.draft_logits is not None and rule in (RATIO, BLOCK):
            bad = bad | (draft.bad & ~target.greedy & chains.has_drafts(given.target_logits.shape[-1]))
        status = status | torch.where(bad, Status.BAD_SAMPLING, 0)
    call = _Call(given, chains, target, draft)
    if rule == BLOCK:
        accepted, how, scale, status = _walk_block(call, status)
    else:
        accepted, how, status = _walk(call, processed, status)
        scale = torch.ones(batch, dtype=torch.float64, device=device)
    if given.rejected_from_target:
        how = torch.where(how == RESIDUAL, PLAIN, how)
    purpose = TARGET_PURPOSE if rule == MATCH else RESIDUAL_PURPOSE
    token, how, status = _emit(call, accepted, how, scale, purpose, status)

    columns = torch.arange(given.max_draft + 1, device=device)
    padded = torch.cat([chains.ids, chains.ids.new_full((batch, 1), -1)], dim=1)
    token_ids = torch.where(columns < accepted[:, None], padded, -1)
    drawn_here = (columns == accepted[:, None]) & (how != NOTHING)[:, None]
    token_ids = torch.where(drawn_here, token[:, None], token_ids)
    logprobs = _logprobs(call, token_ids, processed, given.logprobs_mode)
    return token_ids.to(given.draft_ids.dtype), accepted.int(), status.int(), logprobs


def _walk(call: _Call, processed: Parameters, status: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(accepted, how, status) of the rules that stop at the first rejection."""
    rule = call.given.rule
    alive = ~call.chains.lost
    accepted = torch.zeros_like(call.given.rng.seed)
    how = torch.full_like(accepted, NOTHING)
    for i in range(call.chains.ids.shape[1] + 1):
        x = call.chains.ids[:, i] if i < call.chains.ids.shape[1] else torch.full_like(accepted, -1)
        outside = (x < -1) | (x >= call.vocab)
        status = status | torch.where(alive & outside, Status.BAD_ID, 0)
        ends = outside | (x == -1)
        x = torch.where(ends, 0, x)

        row = call.target_distribution(i)
        status = status | torch.where(alive & row.bad, Status.BAD_TARGET, 0)
        alive = alive & ~row.bad
        tested = alive & ~ends
        if rule == RATIO:
            unreadable = tested & call.draft_unreadable(i, x)
            status = status | torch.where(unreadable, Status.BAD_DRAFT, 0)
            ends = ends | unreadable
            tested = tested & ~unreadable
            q = _at(call.draft_probs(i, x)[0], x).float()
            status = status | torch.where(tested & (q == 0), Status.ZERO_DRAFT, 0)
            p = _at(row.probs(), x).float()
            passes = (p > 0) & (q > 0) & (call.coin(i) * q < p + call.given.over_acceptance)
        else:
            passes = _passes(call, i, row, x, processed)
        how = torch.where(alive & ends, PLAIN, how)
        how = torch.where(tested & ~passes, RESIDUAL if rule == RATIO else PLAIN, how)
        alive = tested & passes
        accepted = accepted + alive.long()
    return accepted, how, status


def _passes(call: _Call, i: int, row: Distribution, x: Tensor, processed: Parameters) -> Tensor:
    """Acceptance of x by the rules that look at the target row alone."""
    given, rule = call.given, call.given.rule
    if rule == MATCH:
        return _rows.plain_draw(row, call.noise(i, TARGET_PURPOSE)) == x
    if rule == GREEDY:
        return row.argmax == x
    if rule == TYPICAL:
        probs = row.probs()
        entropy = -torch.special.xlogy(probs, probs).sum(1)
        p = _at(probs, x)
        limit = torch.full_like(p, given.typical_epsilon).minimum(given.typical_delta * (-entropy).exp())
        return (p > 0) & (p > limit)
    raw = call.target_distribution(i, processed).logits
    logit = _at(raw, x)
    if rule == TOPM:
        lower = torch.arange(call.vocab, device=x.device) < x[:, None]
        before = (raw > logit[:, None]) | ((raw == logit[:, None]) & lower)
        near = before.sum(1) < given.top_m
    else:
        near = (x - row.argmax).abs() <= given.max_distance
    return logit.isfinite() & (near | (i < given.min_block - 1))


def _walk_block(call: _Call, status: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(accepted, how, scale of p in the residual, status) of block verification (algorithms: w, S, h, tau)."""
    width = call.chains.ids.shape[1]
    walking = ~call.chains.lost  # rows still examined
    length = torch.zeros_like(call.given.rng.seed)
    bonus_bad = torch.zeros_like(walking)
    w = [torch.ones(call.batch, dtype=torch.float64, device=status.device)]
    mass: list[Tensor] = []
    for i in range(width + 1):
        x = call.chains.ids[:, i] if i < width else torch.full_like(length, -1)
        outside = (x < -1) | (x >= call.vocab)
        status = status | torch.where(walking & outside, Status.BAD_ID, 0)
        ends = outside | (x == -1)
        x = torch.where(ends, 0, x)
        row = call.target_distribution(i)
        status = status | torch.where(walking & row.bad, Status.BAD_TARGET, 0)
        bonus_bad = bonus_bad | (walking & row.bad)
        walking = walking & ~row.bad & ~ends
        if i == width:
            break
        q, bad = call.draft_probs(i, x)
        status = status | torch.where(walking & bad, Status.BAD_DRAFT, 0)
        walking = walking & ~bad
        length = length + walking.long()
        p = row.probs()
        mass.append((w[-1][:, None] * p - q).clamp(min=0).sum(1))
        px, qx = _at(p, x), _at(q, x)
        status = status | torch.where(walking & (qx == 0), Status.ZERO_DRAFT, 0)
        ratio = torch.where(qx > 0, px / qx.clamp(min=1e-300), 0.0)
        w.append((w[-1] * ratio).clamp(max=1.0))
        # A greedy request is decided at its first miss; what lies behind is not examined.
        walking = walking & ~(call.target.greedy & (w[-1] == 0))
    weights = torch.stack(w, dim=1)
    accepted = torch.zeros_like(length)
    for i in range(1, width + 1):
        free = mass[i] + 1 - w[i] if i < width else torch.ones_like(w[0])
        inner = torch.where(free > 0, mass[i] / free.clamp(min=1e-300), 1.0) if i < width else w[i]
        h = torch.where(length == i, w[i], inner).float()
        accepted = torch.where((i <= length) & (call.coin(i - 1) < h), i, accepted)
    full = accepted == length
    how = torch.where(full, PLAIN, RESIDUAL)
    how = torch.where(call.chains.lost | (full & bonus_bad), NOTHING, how)
    return accepted, how, weights.gather(1, accepted[:, None]).squeeze(1), status


def _emit(
    call: _Call, accepted: Tensor, how: Tensor, scale: Tensor, purpose: int, status: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the token after the accepted prefix: plain, or from (scale p - q)+ with q at the rejected id."""
    row = call.target_distribution(accepted)
    noise = call.noise(accepted, purpose)
    ids = torch.cat([call.chains.ids, call.chains.ids.new_zeros(call.batch, 1)], dim=1)
    x = _at(ids, accepted).clamp(0, call.vocab - 1)
    q, bad = call.draft_probs(accepted, x)
    wants_residual = how == RESIDUAL
    # With draft_stats a draft row is first read here: a bad one ends the draft, as if it had not been proposed.
    late = wants_residual & bad
    status = status | torch.where(late, Status.BAD_DRAFT, 0)
    wants_residual = wants_residual & ~late

    plain = _rows.plain_draw(row, noise)
    point = ~call.has_draft_row
    excluded = torch.nn.functional.one_hot(x, call.vocab).bool()
    without_x, nothing = _rows.draw_without(row, noise, excluded)
    weight = (scale[:, None] * row.probs()).float() - q.float()
    drawn, empty = _rows.residual_draw(torch.where(row.kept, weight, 0.0), noise)
    drawn = torch.where(point, without_x, drawn)
    empty = torch.where(point, nothing, empty)
    status = status | torch.where(wants_residual & empty, Status.EMPTY_RESIDUAL, 0)
    return torch.where(wants_residual & ~empty, drawn, plain), how, status


def _logprobs(call: _Call, token_ids: Tensor, processed: Parameters, mode: int) -> Tensor:
    """Log-probability of every emitted id under its target row; 0 where nothing was emitted."""
    if mode == NO_LOGPROBS:
        return torch.empty(0, device=token_ids.device)
    out = torch.zeros(token_ids.shape, device=token_ids.device)
    raw = _rows.parameters(call.batch, token_ids.device, Sampling())
    for i in range(token_ids.shape[1]):
        ids = token_ids[:, i]
        distribution = (
            call.target_distribution(i, processed)
            if mode == PROCESSED_LOGPROBS
            else _rows.distribution(call.chains.target_at(i), raw)
        )
        out[:, i] = torch.where(ids >= 0, distribution.logprob(ids.clamp(min=0)), 0.0)
    return out
