"""Statistics of a row: partial results of each tile, merged in index order by the row's last program.

A tile keeps sums relative to its own maximum; a merge reads the padded list of tiles with one fixed-shape reduction,
so a sum depends on the row alone: not on the batch, the slot, the launch, nor on who came last.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Partial results of a tile, float32: maximum, sum exp, race score, sum z exp z, maximum and sum of the unmasked row,
# and the logit from which on every id is listed.
F_MAX, F_SUM, F_SCORE, F_ENTROPY, F_RAW_MAX, F_RAW_SUM, F_CUT, F_FIELDS = (tl.constexpr(i) for i in range(8))
# ... and int32: lowest id of the maximum, winner of the race, ids that rank before the drafted one, listed ids.
I_ARG, I_WINNER, I_RANK, I_COUNT, I_FIELDS = (tl.constexpr(i) for i in range(5))
# Record of a row, float32: p(l) = exp((l - max) / T - shift) * scale for l >= threshold; entropy; raw logsumexp.
R_MAX, R_SHIFT, R_SCALE, R_THRESHOLD, R_ENTROPY, R_RAW, R_MASS, R_FIELDS = (tl.constexpr(i) for i in range(8))
# ... and int32: argmax, winner, rank, state.
Q_ARG, Q_WINNER, Q_RANK, Q_STATE, Q_FIELDS = (tl.constexpr(i) for i in range(5))
# State of a row: law known, unusable, or its threshold still open after the first pass.
GOOD, BAD, OPEN = (tl.constexpr(i) for i in range(3))


class Partials(NamedTuple):
    """Scratch of one launch: tickets, partial results [field, row, tile], records [row, field]."""

    tickets: Any  # int32 [rows + batch], zero between launches
    f: Any
    i: Any
    record_f: Any
    record_i: Any
    rows: Any
    tiles: Any


@triton.jit
def put_f(ws, field: tl.constexpr, row, tile, value):
    tl.store(ws.f + (field * ws.rows + row) * ws.tiles + tile, value)


@triton.jit
def put_i(ws, field: tl.constexpr, row, tile, value):
    tl.store(ws.i + (field * ws.rows + row) * ws.tiles + tile, value)


@triton.jit
def get_f(ws, field: tl.constexpr, row, T_PAD: tl.constexpr, other: tl.constexpr):
    """A field of all tiles of a row; .cg because other programs wrote it in this launch."""
    t = tl.arange(0, T_PAD)
    at = (field * ws.rows + row) * ws.tiles + t
    return tl.load(ws.f + at, mask=t < ws.tiles, other=other, cache_modifier=".cg")


@triton.jit
def get_i(ws, field: tl.constexpr, row, T_PAD: tl.constexpr, other: tl.constexpr):
    t = tl.arange(0, T_PAD)
    at = (field * ws.rows + row) * ws.tiles + t
    return tl.load(ws.i + at, mask=t < ws.tiles, other=other, cache_modifier=".cg")


@triton.jit
def weights(x, maximum, inv_t):
    """exp((x - maximum) / T), 0 for -inf; the maximum is finite or stands for an empty tile."""
    z = (x - maximum) * inv_t
    return tl.where(x > float("-inf"), tl.exp(z), 0.0)


@triton.jit
def first_at(x, value, v):
    """Lowest v where x equals value."""
    return tl.min(tl.where(x == value, v, 0x7FFFFFFF), axis=0)


@triton.jit
def put_tile(ws, row, tile, x, raw, v, inv_t, SUM: tl.constexpr, ENTROPY: tl.constexpr, RAW: tl.constexpr):
    """Store maximum, argmax and sums of a tile. A NaN anywhere makes the sum NaN."""
    maximum = tl.max(x, axis=0)
    put_f(ws, F_MAX, row, tile, maximum)
    put_i(ws, I_ARG, row, tile, first_at(x, maximum, v))
    safe = tl.where(maximum > float("-inf"), maximum, 0.0)
    nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    total = tl.full([], 0.0, tl.float32)
    if SUM:
        w = weights(x, safe, inv_t)
        total = tl.sum(w, axis=0)
        if ENTROPY:
            z = tl.where(x > float("-inf"), (x - safe) * inv_t, 0.0)
            put_f(ws, F_ENTROPY, row, tile, tl.sum(w * z, axis=0))
    put_f(ws, F_SUM, row, tile, tl.where(nan, float("nan"), total))
    if RAW:
        top = tl.max(raw, axis=0)
        put_f(ws, F_RAW_MAX, row, tile, top)
        top = tl.where(top > float("-inf"), top, 0.0)
        nan = tl.max((raw != raw).to(tl.int32), axis=0) > 0
        put_f(ws, F_RAW_SUM, row, tile, tl.where(nan, float("nan"), tl.sum(weights(raw, top, 1.0), axis=0)))


@triton.jit
def _merge_sum(maxima, sums, inv_t, total_max):
    """Sum of the tiles' sums relative to the row's maximum."""
    part = weights(maxima, total_max, inv_t) * sums
    return tl.sum(tl.where(maxima > float("-inf"), part, sums), axis=0)  # an empty tile has 0, or NaN


@triton.jit
def merge_row(ws, row, inv_t, greedy, vocab, T_PAD: tl.constexpr, ENTROPY: tl.constexpr, RAW: tl.constexpr):
    """Merge the tiles of a row into its record, without filters; returns (maximum, mass, entropy sum, is_bad)."""
    maxima = get_f(ws, F_MAX, row, T_PAD, float("-inf"))
    args = get_i(ws, I_ARG, row, T_PAD, 0x7FFFFFFF)
    sums = get_f(ws, F_SUM, row, T_PAD, 0.0)
    nan = tl.max((sums != sums).to(tl.int32), axis=0) > 0
    maximum = tl.max(maxima, axis=0)
    bad = nan | (tl.abs(maximum) == float("inf")) | (maximum != maximum)
    maximum = tl.where(bad, 0.0, maximum)
    argmax = tl.min(tl.where(maxima == maximum, args, 0x7FFFFFFF), axis=0)
    argmax = tl.where(bad, 0, argmax)
    mass = _merge_sum(maxima, sums, inv_t, maximum)
    zsum = tl.full([], 0.0, tl.float32)
    if ENTROPY:
        parts = get_f(ws, F_ENTROPY, row, T_PAD, 0.0)
        delta = tl.where(maxima > float("-inf"), (maxima - maximum) * inv_t, 0.0)
        zsum = tl.sum(tl.exp(delta) * (parts + delta * sums), axis=0)
    if RAW:
        tops = get_f(ws, F_RAW_MAX, row, T_PAD, float("-inf"))
        raw_sums = get_f(ws, F_RAW_SUM, row, T_PAD, 0.0)
        top = tl.max(tops, axis=0)
        raw_sum = tl.sum(tl.where(tops > float("-inf"), weights(tops, top, 1.0) * raw_sums, raw_sums), axis=0)
        usable = (tl.abs(top) < float("inf")) & (raw_sum == raw_sum)
        # The raw log-probabilities of an unusable row are NaN.
        raw = tl.where(usable, top + tl.log(raw_sum), float("nan"))
        tl.store(ws.record_f + row * R_FIELDS + R_RAW, raw)
    tl.store(ws.record_i + row * Q_FIELDS + Q_ARG, argmax)
    put_law(ws, row, maximum, mass, float("-inf"), zsum, greedy, bad)
    return maximum, mass, zsum, bad, argmax


@triton.jit
def put_law(ws, row, maximum, mass, threshold, zsum, greedy, bad):
    """Write the law of a row into its record; a greedy one is a point mass at the argmax."""
    mass = tl.where(greedy, 1.0, mass)
    at = ws.record_f + row * R_FIELDS
    tl.store(at + R_MAX, maximum)
    tl.store(at + R_SHIFT, 0.0)
    tl.store(at + R_SCALE, tl.div_rn(tl.full([], 1.0, tl.float32), mass))
    tl.store(at + R_THRESHOLD, tl.where(greedy, maximum, threshold))
    tl.store(at + R_ENTROPY, tl.where(greedy, 0.0, tl.log(mass) - tl.div_rn(zsum, mass)))
    tl.store(at + R_MASS, mass)
    tl.store(ws.record_i + row * Q_FIELDS + Q_STATE, tl.where(bad, BAD, GOOD))


@triton.jit
def get_record_f(ws, row, field: tl.constexpr, mask):
    """A field of the records of rows (a tensor or a scalar); written in this launch or an earlier one."""
    return tl.load(ws.record_f + row * R_FIELDS + field, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def get_record_i(ws, row, field: tl.constexpr, mask):
    return tl.load(ws.record_i + row * Q_FIELDS + field, mask=mask, other=0, cache_modifier=".cg")
