# ruff: noqa: RUF059, SIM102 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""The weights (a p - b q)+ of one row pair a request: what residual_probs and residual_sample share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._types import ResidualArguments
from . import launch as host
from . import scratch
from .chains import Chain
from .codes import S_DRAFT, S_ID, S_SAMPLING, S_TARGET
from .direct import Seen
from .laws import law_of
from .look import digest_rows, look, on_chains
from .pairs import TILES, Pairs, add_tiles, draft_probs, options_of, target_probs
from .records import BAD, Q_STATE, get_record_i
from .rows import Noise, is_active, sampling_of


class Scaled(NamedTuple):
    """Scales of the two laws, and the drafted id where q is a point mass."""

    a: Any  # float32 [batch]
    b: Any
    ids: Any  # int64 [batch] or None


@triton.jit
def residual_case(pairs, scaled, b, ROWS: tl.constexpr):
    """(drafted id, q is a point mass, q is a row, bad target row, status) of request b. A bad draft row is no draft."""
    zero = tl.full([], 0, tl.int64)
    settings = sampling_of(pairs.sampling, b, pairs.target.vocab)
    active = is_active(pairs.sampling, b)
    bad = (active == 0) | (get_record_i(pairs.ws, 2 * b if ROWS else b, Q_STATE, b >= 0) == BAD)
    status = tl.where(settings.bad, S_SAMPLING, 0) | tl.where(bad, S_TARGET, 0)
    known = b < 0
    x = zero
    if scaled.ids is not None:
        x = tl.load(scaled.ids + b)
        known = (x >= 0) & (x < pairs.target.vocab)
        status = status | tl.where((known == 0) & (x != -1), S_ID, 0)
        x = tl.where(known, x, 0)
    point = known
    is_row = b < 0
    if ROWS:
        of_draft = sampling_of(pairs.draft_sampling, b, pairs.draft.vocab)
        bad_row = of_draft.greedy == 0
        if bad_row:
            bad_row = get_record_i(pairs.ws, 2 * b + 1, Q_STATE, b >= 0) == BAD
        status = status | tl.where(of_draft.bad, S_SAMPLING, 0) | tl.where(bad_row, S_DRAFT, 0)
        point = known & of_draft.greedy
        is_row = (of_draft.greedy == 0) & (bad_row == 0)
    return x, point, is_row, bad, tl.where(active, status, 0), settings.inv_t, settings.greedy


@triton.jit
def residual_tile(pairs, scaled, b, tile, x, point, is_row, inv_t, greedy, ROWS: tl.constexpr, TILE: tl.constexpr):
    """(masked target logits, p, (a p - b q)+) of one tile."""
    zero = tl.full([], 0, tl.int32)
    v = tile * TILE + tl.arange(0, TILE)
    row = 2 * b if ROWS else b  # the draft row's record, if there is one, is the next
    logits, p = target_probs(pairs, b, zero, b * 0, row, tile, inv_t, greedy, TILE)
    q = tl.where(point & (v == x), 1.0, 0.0)
    if ROWS:
        if is_row:
            y, q = draft_probs(pairs, b, zero, b * 0, tile, law_of(pairs.ws, row + 1), TILE)
    weight = tl.load(scaled.a + b) * p - tl.load(scaled.b + b) * q
    return logits, p, tl.maximum(weight, 0.0)


@host.entry
def mass_kernel(pairs, scaled, sums, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Sum and largest of (a p - b q)+ of each tile, [2, batch, tiles]. Grid: batch * tiles."""
    pairs = Pairs(*pairs)
    pid = tl.program_id(0).to(tl.int64)
    tiles = pairs.ws.tiles
    b = pid // tiles
    x, point, is_row, bad, code, inv_t, greedy = residual_case(pairs, scaled, b, ROWS)
    tile = (pid % tiles).to(tl.int32)
    weight = tl.zeros([TILE], tl.float32)
    if bad == 0:
        _, _, weight = residual_tile(pairs, scaled, b, tile, x, point, is_row, inv_t, greedy, ROWS, TILE)
    tl.store(sums + pid, tl.sum(weight, axis=0))
    tl.store(sums + tl.num_programs(0) + pid, tl.max(weight, axis=0))


@triton.jit
def mass_of(pairs, sums, b, batch):
    """(mass, largest weight) of request b."""
    tiles = pairs.ws.tiles
    most = tl.full([], 0.0, tl.float32)
    for start in range(0, tiles, TILES):
        t = start + tl.arange(0, TILES)
        most = tl.maximum(most, tl.max(tl.load(sums + (batch + b) * tiles + t, mask=t < tiles, other=0.0), axis=0))
    return add_tiles(sums + b * tiles, tiles), most


def pairs_of(given: ResidualArguments, noise: Noise | None) -> tuple[Pairs, Scaled, Tensor, Seen]:
    """Digest and settle the rows, sum the weights; (what the next launch reads, the scales, those sums, `seen`)."""
    target_logits, draft_logits, sampling = given.target_logits, given.draft_logits, given.sampling
    batch, vocab = target_logits.shape
    scaled = Scaled(given.a, given.b, given.draft_ids)
    has_rows = draft_logits is not None
    target = scratch.rows_of(target_logits.unsqueeze(1), allowed=given.allowed, edits=given.edits)
    draft = target if draft_logits is None else scratch.rows_of(draft_logits.unsqueeze(1), edits=given.draft_edits)
    on = look(batch, target, draft, sampling, given.draft_sampling, 1, int(has_rows))
    chain = Chain(scaled.a, None, host.size(0), host.size(0), on.sampling)
    on = on_chains(on, chain, noise, more_draft=1)
    digest_rows(on, None)
    pairs = Pairs(
        chain, target, draft, scratch.columns(given.token_map if has_rows else None, vocab), on.sampling,
        on.draft_sampling, on.digest, on.plan,
    )  # fmt: skip
    sums = torch.empty(2 * batch * on.digest.tiles, dtype=torch.float32, device=target_logits.device)
    host.launch(
        mass_kernel, batch * on.digest.tiles, pairs, scaled, sums, ROWS=has_rows, TILE=host.TILE,
        seen=on.seen, **{"registers": host.STREAM_REGISTERS, **options_of(target, draft, pairs.columns)},
    )  # fmt: skip
    return pairs, scaled, sums, on.seen
