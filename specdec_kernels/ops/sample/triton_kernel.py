"""sample in Triton: one launch. Each tile keeps its statistics and its best n; a row's last program merges them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.filters import list_tile, load_listed_ids, load_lists, threshold_of
from ..._triton.handshake import arrive
from ..._triton.noise import tile_words, words
from ..._triton.race import pop, race_scores
from ..._triton.rows import Noise, Sampling, load_logits, logit_at, mask_allowed, sampling_of
from ..._triton.stats import R_MASS, R_MAX, R_RAW, R_THRESHOLD, get_record_f, merge_row, put_law, put_tile


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
    best: Any  # float32 [batch, tiles, NP]: best scores of each tile
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
    at = (b * draw.ws.tiles + tile) * NP
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
        word = tile_words(draw.noise, b, position, PURPOSE, tile * TILE, TILE)
    else:
        word = words(draw.noise, b, position, PURPOSE, ids)
    competes = (x >= threshold) & (x > float("-inf")) & (out == 0)
    score = race_scores(x * inv_t, competes, word)
    score = tl.where(by_logit, tl.where(competes, x, float("-inf")), score)
    _keep_best(draw, b, tile, score, ids, v, N, NP)


@triton.jit
def _rescan(draw, b, inv_t, threshold, by_logit, PURPOSE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    """Every tile of the row again, by one program: where the lists do not reach, or scores overflowed."""
    tl.debug_barrier()
    for tile in range(0, draw.ws.tiles):
        x = mask_allowed(load_logits(draw.rows, b * draw.rows.request, tile * TILE, TILE), draw.rows, b, tile * TILE,
                         TILE)  # fmt: skip
        _race_tile(draw, b, tile, x, inv_t, threshold, by_logit, PURPOSE, N, NP, TILE)
    tl.debug_barrier()


@triton.jit
def _tiles_best(draw, b, N: tl.constexpr, NP: tl.constexpr, T_PAD: tl.constexpr):
    """(scores, ids, columns) that the tiles kept, [T_PAD * NP]."""
    lane = tl.arange(0, T_PAD * NP)
    mask = (lane // NP < draw.ws.tiles) & (lane % NP < N)
    at = b * draw.ws.tiles * NP + lane
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
        if LOGPROBS == 2:
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
    draw, b, PURPOSE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LOGPROBS: tl.constexpr, FILTERS: tl.constexpr,
    TILE: tl.constexpr, T_PAD: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Merge a row: its law, the best n, the outputs."""
    inv_t, t, k, p, floor, filtered, greedy, bad_value = sampling_of(draw.sampling, b, draw.rows.vocab)
    maximum, mass, zsum, bad, argmax = merge_row(
        draw.ws, b, inv_t, greedy, draw.rows.vocab, T_PAD, False, LOGPROBS == 2
    )
    threshold = tl.full([], float("-inf"), tl.float32)
    scan = filtered & (bad == 0)
    listed = b < 0
    if FILTERS:
        if scan:
            threshold, mass, zsum, listed = threshold_of(
                draw.ws, draw.lists, draw.rows, b * draw.rows.request, b, b, (maximum, mass),
                (inv_t, t, k, p, floor), TILE, T_PAD, LISTED,
            )  # fmt: skip
            put_law(draw.ws, b, maximum, mass, threshold, zsum, b < 0, b < 0)
    tl.debug_barrier()
    status = tl.where(bad_value, 64, 0) | tl.where(bad, 1, 0)
    log_mass = tl.log(get_record_f(draw.ws, b, R_MASS, b >= 0))
    lse = tl.where(greedy, 0.0, maximum * inv_t + log_mass)
    tl.store(draw.status + b, status)
    tl.store(draw.logsumexp + b, tl.where(bad, float("nan"), lse))
    tl.store(draw.threshold + b, tl.where(bad, float("nan"), get_record_f(draw.ws, b, R_THRESHOLD, b >= 0)))
    if greedy | bad:
        one = tl.arange(0, 2)
        column = one * 0 + argmax
        ids, out = _ids_of(draw, b, column)
        score = tl.where((one == 0) & (out == 0), 0.0, float("-inf"))
        _emit(draw, b, score, ids, column, inv_t, greedy, bad, N, LOGPROBS)
    else:
        if scan & (listed == 0):
            _rescan(draw, b, inv_t, threshold, False, PURPOSE, N, NP, TILE)
        overflowed = b < 0
        if listed:
            if FILTERS:
                x = load_lists(draw.ws, draw.lists, b, T_PAD, LISTED)
                v = load_listed_ids(draw.ws, draw.lists, b, x, TILE, T_PAD, LISTED)
                ids, out = _ids_of(draw, b, v)
                word = words(draw.noise, b, tl.load(draw.noise.position + b), PURPOSE, ids)
                competes = (x >= threshold) & (x > float("-inf")) & (out == 0)
                score = race_scores(x * inv_t, competes, word)
                overflowed = tl.max(score, axis=0) == float("-inf")
                if overflowed == 0:
                    _emit(draw, b, score, ids, v, inv_t, greedy, bad, N, LOGPROBS)
        else:
            score, ids, column = _tiles_best(draw, b, N, NP, T_PAD)
            overflowed = tl.max(score, axis=0) == float("-inf")
            if overflowed == 0:
                _emit(draw, b, score, ids, column, inv_t, greedy, bad, N, LOGPROBS)
        if overflowed:
            _rescan(draw, b, inv_t, threshold, True, PURPOSE, N, NP, TILE)
            score, ids, column = _tiles_best(draw, b, N, NP, T_PAD)
            _emit(draw, b, score, ids, column, inv_t, greedy, bad, N, LOGPROBS)


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
    put_tile(draw.ws, b, tile, x, raw, start + tl.arange(0, TILE), inv_t, True, False, LOGPROBS == 2)
    if FILTERS:
        if filtered:
            list_tile(draw.ws, draw.lists, b, tile, x, TILE, LISTED)
    if (filtered == 0) & (greedy == 0):
        _race_tile(draw, b, tile, x, inv_t, tl.full([], float("-inf"), tl.float32), False, PURPOSE, N, NP, TILE)
    if arrive(draw.ws.tickets + b, draw.ws.tiles):
        _finish(draw, b, PURPOSE, N, NP, LOGPROBS, FILTERS, TILE, T_PAD, LISTED)


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
    slots = batch * tiles * width
    best = torch.empty(slots, dtype=torch.float32, device=logits.device)
    best_id, best_column = (torch.empty(slots, dtype=torch.int32, device=logits.device) for _ in range(2))
    lists = scratch.lists(logits, batch, tiles, (top_k, top_p, min_p))
    excluded = 0 if exclude_ids is None else exclude_ids.shape[1]
    draw = Draw(
        scratch.rows_of(logits.unsqueeze(1), allowed=allowed), Sampling(temperature, top_k, top_p, min_p),
        Noise(seed, position, step, lane), exclude_ids if excluded else None, excluded, token_map,
        scratch.partials(tickets, batch, tiles), lists, best, best_id, best_column,
        token_ids, logprobs, logsumexp, threshold, status,
    )  # fmt: skip
    host.launch(
        _sample_kernel, batch * tiles, draw, PURPOSE=purpose, N=num_samples, NP=width, LOGPROBS=logprobs_mode,
        FILTERS=lists is not None, TILE=host.TILE, T_PAD=host.power(tiles), LISTED=host.LISTED,
    )  # fmt: skip
