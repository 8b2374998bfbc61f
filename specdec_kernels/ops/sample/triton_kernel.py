# ruff: noqa: RUF059, SIM102 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""sample in Triton: one launch, two with filters. Tiles keep their statistics and best n; the last program merges."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.brackets import close_row, gather_tile, open_row, race_closed, sample_tile
from ..._triton.codes import RAW_LOGPROBS, S_SAMPLING, S_TARGET
from ..._triton.filters import by_scanning, from_lists, list_tile, load_listed_ids, load_lists
from ..._triton.handshake import arrive
from ..._triton.noise import noise_of, tile_noise
from ..._triton.race import pop, race_scores
from ..._triton.rows import Noise, Sampling, load_logits, logit_at, mask_allowed, sampling_of
from ..._triton.stats import (
    OPEN,
    Q_ARG,
    Q_STATE,
    R_MASS,
    R_MAX,
    R_RAW,
    get_record_f,
    get_record_i,
    merge_row,
    put_law,
    put_tile,
)  # fmt: skip


class Draw(NamedTuple):
    """What a launch reads and writes."""

    rows: Any
    sampling: Any
    noise: Any
    exclude: Any  # int64 [batch, excluded] or None
    excluded: Any
    token_map: Any
    ws: Any
    lists: Any
    best: Any  # float32 [batch, 2 * tiles, NP]: best scores of each tile, or half tile
    best_id: Any  # int32, likewise
    best_column: Any
    token_ids: Any
    logprobs: Any
    logsumexp: Any
    threshold: Any
    status: Any


@triton.jit
def _ids_of(draw, b, v):
    """(target ids of columns v, whether each is excluded)."""
    ids = v
    if draw.token_map is not None:
        ids = tl.load(draw.token_map + v, mask=v < draw.rows.vocab, other=0)
    out = v < 0
    if draw.exclude is not None:
        for j in range(0, draw.excluded):
            out = out | (ids == tl.load(draw.exclude + b * draw.excluded + j))
    return ids, out


@triton.jit
def _keep_best(draw, b, tile, score, ids, v, N: tl.constexpr, NP: tl.constexpr):
    """Store the best n of a tile."""
    at = (b * draw.ws.tiles * 2 + tile) * NP
    for j in range(0, N):
        top, place, column, score = pop(score, ids, v)
        tl.store(draw.best + at + j, top)
        tl.store(draw.best_id + at + j, place)
        tl.store(draw.best_column + at + j, column)


@triton.jit
def _race_tile(draw, b, tile, x, inv_t, threshold, by_logit, PURPOSE: tl.constexpr, N: tl.constexpr,
               NP: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The race of one tile, or its largest logits where every score of the row overflowed."""
    v = tile * TILE + tl.arange(0, TILE)
    ids, out = _ids_of(draw, b, v)
    position = tl.load(draw.noise.position + b)
    if draw.token_map is None:
        neg_log_e = tile_noise(draw.noise, b, position, PURPOSE, tile * TILE, TILE)
    else:
        neg_log_e = noise_of(draw.noise, b, position, PURPOSE, ids)
    competes = (x >= threshold) & (x > float("-inf")) & (out == 0)
    score = race_scores(x * inv_t, competes, neg_log_e)
    score = tl.where(by_logit, tl.where(competes, x, float("-inf")), score)
    _keep_best(draw, b, tile, score, ids, v, N, NP)


@triton.jit
def _rescan(
    draw, b, inv_t, threshold, by_logit, PURPOSE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr
):
    """The whole row again, by one program: where the lists do not reach, or scores overflowed.

    In half tiles, for here it shares its registers with the rest of a long kernel.
    """
    HALF: tl.constexpr = TILE // 2
    tl.debug_barrier()
    for tile in range(0, draw.ws.tiles * 2):
        x = load_logits(draw.rows, b * draw.rows.request, tile * HALF, HALF)
        x = mask_allowed(x, draw.rows, b, tile * HALF, HALF)
        _race_tile(draw, b, tile, x, inv_t, threshold, by_logit, PURPOSE, N, NP, HALF)
    tl.debug_barrier()


@triton.jit
def _tiles_best(draw, b, parts, N: tl.constexpr, NP: tl.constexpr, PARTS: tl.constexpr):
    """(scores, ids, columns) that the tiles, or the half tiles of a rescan, kept: [PARTS * NP]."""
    lane = tl.arange(0, PARTS * NP)
    mask = (lane // NP < parts) & (lane % NP < N)
    at = b * draw.ws.tiles * 2 * NP + lane
    return (
        tl.load(draw.best + at, mask=mask, other=float("-inf"), cache_modifier=".cg"),
        tl.load(draw.best_id + at, mask=mask, other=-1, cache_modifier=".cg"),
        tl.load(draw.best_column + at, mask=mask, other=-1, cache_modifier=".cg"),
    )


@triton.jit
def _emit(draw, b, score, ids, column, inv_t, greedy, bad, N: tl.constexpr, LOGPROBS: tl.constexpr):
    """Write the best n of (score, id, column) and their log-probabilities."""
    maximum = get_record_f(draw.ws, b, R_MAX, b >= 0)
    log_mass = tl.log(get_record_f(draw.ws, b, R_MASS, b >= 0))
    for j in range(0, N):
        top, token, place, score = pop(score, ids, column)
        drawn = (place >= 0) & (bad == 0)
        tl.store(draw.token_ids + b * N + j, tl.where(drawn, token, -1).to(tl.int64))
        at = tl.maximum(place, 0)
        if LOGPROBS == RAW_LOGPROBS:
            raw = get_record_f(draw.ws, b, R_RAW, b >= 0)
            logit = tl.load(draw.rows.ptr + b * draw.rows.request + at).to(tl.float32)
            uniform = -tl.log(tl.full([], 0.0, tl.float32) + draw.rows.vocab)
            value = tl.where(raw == raw, logit - raw, uniform)
        else:
            logit = logit_at(draw.rows, b * draw.rows.request, b, at)
            value = tl.where(greedy, 0.0, (logit - maximum) * inv_t - log_mass)
        tl.store(draw.logprobs + b * N + j, tl.where(drawn, value, 0.0))


@triton.jit
def _finish(
    draw, b, argmax, bad, threshold, score, ids, column, PURPOSE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    LOGPROBS: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a row whose law is settled, from the scores of all that may win."""
    inv_t, _, _, _, _, _, greedy, bad_value = sampling_of(draw.sampling, b, draw.rows.vocab)
    tl.debug_barrier()
    maximum = get_record_f(draw.ws, b, R_MAX, b >= 0)
    log_mass = tl.log(get_record_f(draw.ws, b, R_MASS, b >= 0))
    lse = tl.where(greedy, 0.0, maximum * inv_t + log_mass)
    tl.store(draw.status + b, tl.where(bad_value, S_SAMPLING, 0) | tl.where(bad, S_TARGET, 0))
    tl.store(draw.logsumexp + b, tl.where(bad, float("nan"), lse))
    tl.store(draw.threshold + b, tl.where(bad, float("nan"), tl.where(greedy, maximum, threshold)))
    if greedy | bad:
        one = tl.arange(0, 2)
        place = one * 0 + argmax
        names, out = _ids_of(draw, b, place)
        only = tl.where((one == 0) & (out == 0), 0.0, float("-inf"))
        _emit(draw, b, only, names, place, inv_t, greedy, bad, N, LOGPROBS)
    elif tl.max(score, axis=0) > float("-inf"):
        _emit(draw, b, score, ids, column, inv_t, greedy, bad, N, LOGPROBS)
    else:
        # Every score overflowed: the largest logits win.
        _rescan(draw, b, inv_t, threshold, True, PURPOSE, N, NP, TILE)
        best, names, place = _tiles_best(draw, b, draw.ws.tiles * 2, N, NP, T_PAD * 2)
        _emit(draw, b, best, names, place, inv_t, greedy, bad, N, LOGPROBS)


@triton.jit
def _finish_tiles(
    draw, b, argmax, bad, threshold, PURPOSE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    LOGPROBS: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr,
):  # fmt: skip
    """Finish a row from the best of its tiles."""
    score, ids, column = _tiles_best(draw, b, draw.ws.tiles, N, NP, T_PAD)
    _finish(draw, b, argmax, bad, threshold, score, ids, column, PURPOSE, N, NP, LOGPROBS, TILE, T_PAD)


@triton.jit
def _scores_of(draw, b, x, v, threshold, inv_t, PURPOSE: tl.constexpr):
    """(scores, ids) of single columns v with logits x, -inf where they do not compete."""
    real = x > float("-inf")
    ids, out = _ids_of(draw, b, tl.where(real, v, 0))
    neg_log_e = noise_of(draw.noise, b, tl.load(draw.noise.position + b), PURPOSE, ids)
    return race_scores(x * inv_t, real & (x >= threshold) & (out == 0), neg_log_e), ids


@triton.jit
def _settle(
    draw, b, PURPOSE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LOGPROBS: tl.constexpr, FILTERS: tl.constexpr,
    TILE: tl.constexpr, T_PAD: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Law of a row from its tiles; then its draw, unless the threshold lies below the lists."""
    inv_t, t, k, p, floor, filtered, greedy, _ = sampling_of(draw.sampling, b, draw.rows.vocab)
    maximum, mass, zsum, bad, argmax = merge_row(
        draw.ws, b, inv_t, greedy, draw.rows.vocab, T_PAD, False, LOGPROBS == RAW_LOGPROBS
    )
    everything = tl.full([], float("-inf"), tl.float32)
    if FILTERS:
        if filtered & (bad == 0):
            how = (inv_t, t, k, p, floor)
            threshold, kept, zsum, found = from_lists(draw.ws, draw.lists, b, (maximum, mass), how, T_PAD, LISTED)
            if found:
                put_law(draw.ws, b, maximum, kept, threshold, zsum, b < 0, b < 0)
                x = load_lists(draw.ws, draw.lists, b, T_PAD, LISTED)
                v = load_listed_ids(draw.ws, draw.lists, b, x, TILE, T_PAD, LISTED)
                score, ids = _scores_of(draw, b, x, v, threshold, inv_t, PURPOSE)
                _finish(draw, b, argmax, bad, threshold, score, ids, v, PURPOSE, N, NP, LOGPROBS, TILE, T_PAD)
            else:
                open_row(draw.ws, draw.lists, b, (maximum, mass), how, T_PAD, LISTED, TILE // 32)
        else:
            _finish_tiles(draw, b, argmax, bad, everything, PURPOSE, N, NP, LOGPROBS, TILE, T_PAD)
    else:
        _finish_tiles(draw, b, argmax, bad, everything, PURPOSE, N, NP, LOGPROBS, TILE, T_PAD)


@triton.jit
def _sample_kernel(
    draw, PURPOSE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LOGPROBS: tl.constexpr, FILTERS: tl.constexpr,
    TILE: tl.constexpr, T_PAD: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Ids = the n largest of logit / T - log E over the kept ids of a row.

    Grid: batch * tiles; a program owns one tile. The last program of a row finds its threshold, merges, writes.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % draw.ws.tiles).to(tl.int32)
    b = pid // draw.ws.tiles
    inv_t, _, _, _, _, filtered, greedy, _ = sampling_of(draw.sampling, b, draw.rows.vocab)
    start = tile * TILE
    raw = load_logits(draw.rows, b * draw.rows.request, start, TILE)
    x = mask_allowed(raw, draw.rows, b, start, TILE)
    put_tile(draw.ws, b, tile, x, raw, start + tl.arange(0, TILE), inv_t, True, False, LOGPROBS == RAW_LOGPROBS)
    if FILTERS:
        if filtered:
            list_tile(draw.ws, draw.lists, b, tile, x, TILE, LISTED)
            sample_tile(draw.ws, draw.lists, b, tile, x, TILE)
    if (filtered == 0) & (greedy == 0):
        _race_tile(draw, b, tile, x, inv_t, tl.full([], float("-inf"), tl.float32), False, PURPOSE, N, NP, TILE)
    if arrive(draw.ws.tickets + b, draw.ws.tiles):
        _settle(draw, b, PURPOSE, N, NP, LOGPROBS, FILTERS, TILE, T_PAD, LISTED)


@triton.jit
def _again_kernel(
    draw, PURPOSE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LOGPROBS: tl.constexpr, TILE: tl.constexpr,
    T_PAD: tl.constexpr, GATHERED: tl.constexpr, RACE: tl.constexpr,
):  # fmt: skip
    """Rows whose threshold lies below their lists are read once more. Grid: as `_sample_kernel`."""
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % draw.ws.tiles).to(tl.int32)
    b = pid // draw.ws.tiles
    if get_record_i(draw.ws, b, Q_STATE, b >= 0) == OPEN:
        inv_t, t, k, p, floor, _, _, _ = sampling_of(draw.sampling, b, draw.rows.vocab)
        how = (inv_t, t, k, p, floor)
        position = tl.load(draw.noise.position + b)
        gather_tile(
            draw.ws, draw.lists, draw.rows, b * draw.rows.request, b, b, tile, how, draw.noise, b, position,
            RACE, PURPOSE, False, TILE, GATHERED,
        )  # fmt: skip
        if arrive(draw.ws.tickets + b, draw.ws.tiles):
            maximum = get_record_f(draw.ws, b, R_MAX, b >= 0)
            argmax = get_record_i(draw.ws, b, Q_ARG, b >= 0)
            threshold, mass, zsum, closed = close_row(draw.ws, draw.lists, b, how, False, GATHERED)
            if closed == 0:
                threshold, mass, zsum = by_scanning(draw.rows, b * draw.rows.request, b, maximum, how)
            put_law(draw.ws, b, maximum, mass, threshold, zsum, b < 0, b < 0)
            parts = draw.ws.tiles * 2
            raced = b < 0
            if RACE:
                raced = closed
                if raced:
                    best, at = race_closed(
                        draw.ws, draw.lists, b, threshold, inv_t, draw.noise, b, position, PURPOSE, T_PAD, GATHERED
                    )
                    # The winner takes the place of the best of a first and only tile.
                    slot = b * draw.ws.tiles * 2 * NP
                    tl.store(draw.best + slot, best)
                    tl.store(draw.best_id + slot, at)
                    tl.store(draw.best_column + slot, at)
                    parts = parts * 0 + 1
                    tl.debug_barrier()
            if raced == 0:
                _rescan(draw, b, inv_t, threshold, False, PURPOSE, N, NP, TILE)
            score, ids, column = _tiles_best(draw, b, parts, N, NP, T_PAD * 2)
            _finish(draw, b, argmax, b < 0, threshold, score, ids, column, PURPOSE, N, NP, LOGPROBS, TILE, T_PAD)


def sample_out(
    logits: Tensor, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    seed: Tensor, position: Tensor, step: Tensor | None, purpose: int, num_samples: int, lane: Tensor | None,
    exclude_ids: Tensor | None, token_map: Tensor | None, allowed: Tensor | None, logprobs_mode: int,
    token_ids: Tensor, logprobs: Tensor, logsumexp: Tensor, threshold: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.sample`."""
    batch, vocab = logits.shape
    tiles, width = host.tiles_of(vocab), host.power(num_samples)
    tickets = host.counters(batch, logits.device)
    slots = batch * tiles * 2 * width
    best = torch.empty(slots, dtype=torch.float32, device=logits.device)
    best_id, best_column = (torch.empty(slots, dtype=torch.int32, device=logits.device) for _ in range(2))
    # More than one winner, or names and exclusions of ids, are raced over the row itself once its law is known.
    races = num_samples == 1 and token_map is None and exclude_ids is None
    lists = scratch.lists(logits, batch, tiles, (top_k, top_p, min_p), races=races, ids=True)
    excluded = 0 if exclude_ids is None else exclude_ids.shape[1]
    draw = Draw(
        scratch.rows_of(logits.unsqueeze(1), allowed=allowed), Sampling(temperature, top_k, top_p, min_p),
        Noise(seed, position, step, lane), exclude_ids if excluded else None, excluded, token_map,
        scratch.partials(tickets, batch, tiles), lists, best, best_id, best_column,
        token_ids, logprobs, logsumexp, threshold, status,
    )  # fmt: skip
    shape = {
        "PURPOSE": purpose, "N": num_samples, "NP": width, "LOGPROBS": logprobs_mode, "TILE": host.TILE,
        "T_PAD": host.power(tiles),
    }  # fmt: skip
    host.launch(_sample_kernel, batch * tiles, draw, FILTERS=lists is not None, LISTED=host.LISTED, **shape)
    if lists is not None:
        shape["num_warps"] = host.MANY_WARPS
        host.launch(_again_kernel, batch * tiles, draw, GATHERED=host.GATHERED, RACE=races, **shape)
