"""min-p, top-k, top-p as one threshold and one mass a row, exact at ties, without sorting a row.

Each tile lists its largest logits while it is in registers, with the cut from which on its list is complete. A
threshold at or above every tile's cut is found in the lists alone; that is nearly every row of a language model.
Masses are summed as integers (2^-40 of the largest weight), so that a search by bisection is monotone and no sum
depends on who came first.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .noise import log, noise_of, tile_noise
from .race import race_scores, winner
from .rows import key_of, load_logits, mask_allowed, value_of
from .stats import F_CUT, I_COUNT, get_f, get_i, put_f, put_i, weights

UNIT = tl.constexpr(1099511627776.0)  # 2^40
SCAN = tl.constexpr(1024)  # ids that a lone program takes at once where it scans a row: registers, not speed


class Lists(NamedTuple):
    """Scratch of the filters; logits in their own dtype."""

    logits: Any  # [rows, tiles, LISTED], the largest of each tile
    offsets: Any  # int16, their places inside the tile, or None where no row is raced
    samples: Any  # [rows, tiles, TILE / 32], one of every 32
    bracket: Any  # int32 [rows, 2], keys between which an open threshold lies
    sums: Any  # int64 [rows, 8], see brackets.py
    gathered: Any  # [rows, GATHERED], logits inside the bracket
    gathered_ids: Any  # int32, likewise, or None


@triton.jit
def _ranked(ordered, RANK: tl.constexpr, SIZE: tl.constexpr):
    """The RANK-th (from 1) of values in order, or the last."""
    PLACE: tl.constexpr = RANK if RANK < SIZE else SIZE
    return tl.max(tl.where(tl.arange(0, SIZE) == PLACE - 1, ordered, float("-inf")), axis=0)


@triton.jit
def list_tile(ws, lists, row, tile, x, TILE: tl.constexpr, LISTED: tl.constexpr):
    """List the ids of a tile at or above a cut that about LISTED / 2 of them reach.

    The cut is the LISTED / 2-th largest of the maxima of interleaved strata: a few more ids reach it, unless many
    large ones share a stratum; then a higher cut is tried, and at last the list stays empty with a cut of +inf.
    """
    STRATA: tl.constexpr = TILE // 32
    maxima = tl.sort(tl.max(tl.reshape(x, [32, STRATA]), axis=0), descending=True)
    cut = tl.full([], float("inf"), tl.float32)
    for attempt in tl.static_range(3):
        level = _ranked(maxima, LISTED >> (attempt + 1), STRATA)
        fits = tl.sum(((x >= level) & (x > float("-inf"))).to(tl.int32), axis=0) <= LISTED
        cut = tl.where(fits & (cut == float("inf")), level, cut)
    listed = (x >= cut) & (x > float("-inf")) & (x < float("inf"))
    place_of = tl.cumsum(listed.to(tl.int32), axis=0) - 1
    at = (row * ws.tiles + tile) * LISTED + place_of
    tl.store(lists.logits + at, x.to(lists.logits.dtype.element_ty), mask=listed)
    if lists.offsets is not None:
        tl.store(lists.offsets + at, tl.arange(0, TILE).to(tl.int16), mask=listed)
    put_f(ws, F_CUT, row, tile, cut)
    put_i(ws, I_COUNT, row, tile, tl.sum(listed.to(tl.int32), axis=0))


@triton.jit
def min_p_threshold(maximum, t, floor):
    """Max + T log(min_p), -inf where min-p is off."""
    below = tl.where(floor >= 1, 0.0, t * log(tl.maximum(floor, 1.1754943508222875e-38)))
    return tl.where(floor > 0, maximum + below, float("-inf"))


@triton.jit
def units(x, maximum, inv_t):
    """Weights as integers."""
    return (weights(x, maximum, inv_t) * UNIT).to(tl.int64)


@triton.jit
def lowest_key():
    return key_of(tl.full([], float("-inf"), tl.float32))


@triton.jit
def load_lists(ws, lists, row, T_PAD: tl.constexpr, LISTED: tl.constexpr):
    """Listed logits of a row as float32 [T_PAD * LISTED], -inf where a list is shorter."""
    count = get_i(ws, I_COUNT, row, T_PAD, 0)
    t = tl.arange(0, T_PAD)
    j = tl.arange(0, LISTED)
    at = (row * ws.tiles + t[:, None]) * LISTED + j[None, :]
    mask = j[None, :] < count[:, None]
    x = tl.load(lists.logits + at, mask=mask, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    return tl.reshape(x, [T_PAD * LISTED])


@triton.jit
def load_listed_ids(ws, lists, row, x, TILE: tl.constexpr, T_PAD: tl.constexpr, LISTED: tl.constexpr):
    """Ids of the listed logits x, as `load_lists` gave them."""
    at = tl.arange(0, T_PAD * LISTED)
    place = row * ws.tiles * LISTED + at
    offset = tl.load(lists.offsets + place, mask=x > float("-inf"), other=0, cache_modifier=".cg")
    return (at // LISTED) * TILE + offset.to(tl.int32)


@triton.jit
def kth_in(keys, k, low, high):
    """Largest key in [low, high] that at least k keys reach; low if none."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def edge_in(keys, maximum, inv_t, need, low, high, whole):
    """(largest key in [low, high] whose mass from there up to `high` is >= need, that mass); (low, whole) if none.

    Each step weighs only what lies between its middle and the last upper end: weights are made where they are used,
    for they would not all fit in registers.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    known, reached = tl.full([], 0, tl.int64), whole
    while low < high:
        middle = low + (high - low + 1) // 2
        inside = (keys >= middle.to(tl.int32)) & (keys <= high.to(tl.int32))  # int32: keys stay as they are
        between = tl.where(inside, value_of(keys), float("-inf"))
        mass = known + tl.sum(units(between, maximum, inv_t), axis=0)
        enough = mass.to(tl.float64) >= need
        known, reached = tl.where(enough, known, mass), tl.where(enough, mass, reached)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low.to(tl.int32), reached


@triton.jit
def mass_from(keys, low, maximum, inv_t):
    """(mass, entropy sum), in units, of the keys at or above `low`."""
    x = tl.where(keys >= low, value_of(keys), float("-inf"))
    w = weights(x, maximum, inv_t)
    z = tl.where(x > float("-inf"), (x - maximum) * inv_t, 0.0)
    return tl.sum((w * UNIT).to(tl.int64), axis=0), tl.sum((w * z * UNIT).to(tl.int64), axis=0)


@triton.jit
def from_lists(ws, lists, row, law, sampling, T_PAD: tl.constexpr, LISTED: tl.constexpr):
    """(threshold, mass, entropy sum, found): the filters of one row, from its lists if they reach far enough.

    law = (maximum, mass of the whole row); sampling = (inv_t, T, top_k, top_p, min_p).
    """
    maximum, total = law
    inv_t, t, k, p, floor = sampling
    x = load_lists(ws, lists, row, T_PAD, LISTED)
    keys = key_of(x)
    cut = key_of(tl.max(get_f(ws, F_CUT, row, T_PAD, float("-inf")), axis=0))
    top = key_of(maximum)
    threshold = key_of(min_p_threshold(maximum, t, floor))
    if k > 0:
        threshold = tl.maximum(threshold, kth_in(keys, k, lowest_key(), top))
    whole = total.to(tl.float64) * UNIT
    if p < 1:
        if threshold >= cut:
            whole = mass_from(keys, threshold, maximum, inv_t)[0].to(tl.float64)
        # Below the cut the lists say nothing; a mass over the whole row is known without them.
        if (threshold >= cut) | ((k == 0) & (floor == 0)):
            threshold = edge_in(
                keys, maximum, inv_t, whole * p.to(tl.float64), threshold, top, tl.full([], 0, tl.int64)
            )[0]
    found = (threshold >= cut) & (cut < key_of(tl.full([], float("inf"), tl.float32)))
    threshold = tl.minimum(threshold, top)
    kept, zsum = mass_from(keys, threshold, maximum, inv_t)
    scale = 1.0 / UNIT
    return value_of(threshold), kept.to(tl.float32) * scale, zsum.to(tl.float32) * scale, found


@triton.jit
def _scan(rows, offset, bits, low, law, inv_t):
    """(count, mass, entropy sum) of the logits of a row whose key is >= low, in units."""
    count = tl.full([], 0, tl.int64)
    mass = tl.full([], 0, tl.int64)
    zsum = tl.full([], 0, tl.int64)
    for start in range(0, rows.vocab, SCAN):
        x = mask_allowed(load_logits(rows, offset, start, SCAN), rows, bits, start, SCAN)
        on = (key_of(x) >= low.to(tl.int32)) & (x > float("-inf"))
        w = weights(x, law, inv_t)
        z = tl.where(on, (x - law) * inv_t, 0.0)
        count += tl.sum(on.to(tl.int64), axis=0)
        mass += tl.sum(tl.where(on, (w * UNIT).to(tl.int64), 0), axis=0)
        zsum += tl.sum(tl.where(on, (w * z * UNIT).to(tl.int64), 0), axis=0)
    return count, mass, zsum


@triton.jit
def by_scanning(rows, offset, bits, maximum, sampling):
    """(threshold, mass, entropy sum) of one row by bisection over the whole row: exact, slow, rarely needed."""
    inv_t, t, k, p, floor = sampling
    lowest = lowest_key().to(tl.int64)
    top = key_of(maximum).to(tl.int64)
    threshold = key_of(min_p_threshold(maximum, t, floor)).to(tl.int64)
    if k > 0:
        low, high = lowest, top
        while low < high:
            middle = low + (high - low + 1) // 2
            count, _, _ = _scan(rows, offset, bits, middle, maximum, inv_t)
            low, high = tl.where(count >= k, middle, low), tl.where(count >= k, high, middle - 1)
        threshold = tl.maximum(threshold, low)
    threshold = tl.minimum(threshold, top)
    if p < 1:
        _, whole, _ = _scan(rows, offset, bits, threshold, maximum, inv_t)
        need = whole.to(tl.float64) * p.to(tl.float64)
        low, high = threshold, top
        while low < high:
            middle = low + (high - low + 1) // 2
            _, mass, _ = _scan(rows, offset, bits, middle, maximum, inv_t)
            enough = mass.to(tl.float64) >= need
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        threshold = low
    _, mass, zsum = _scan(rows, offset, bits, threshold, maximum, inv_t)
    scale = 1.0 / UNIT
    return value_of(threshold.to(tl.int32)), mass.to(tl.float32) * scale, zsum.to(tl.float32) * scale


@triton.jit
def race_in_lists(
    ws, lists, row, threshold, inv_t, noise, b, position, PURPOSE: tl.constexpr, TILE: tl.constexpr,
    T_PAD: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """(best score, id) among the listed ids at or above the threshold."""
    x = load_lists(ws, lists, row, T_PAD, LISTED)
    v = load_listed_ids(ws, lists, row, x, TILE, T_PAD, LISTED)
    competes = (x > float("-inf")) & (x >= threshold)
    return winner(race_scores(x * inv_t, competes, noise_of(noise, b, position, PURPOSE, v)), v)


@triton.jit
def race_in_row(rows, offset, bits, threshold, inv_t, noise, b, position, PURPOSE: tl.constexpr):
    """(best score, id) among the ids of a whole row at or above the threshold."""
    best = tl.full([], float("-inf"), tl.float32)
    at = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, rows.vocab, SCAN):
        x = mask_allowed(load_logits(rows, offset, start, SCAN), rows, bits, start, SCAN)
        neg_log_e = tile_noise(noise, b, position, PURPOSE, start, SCAN)
        ok = (x >= threshold) & (x > float("-inf"))
        score, v = winner(race_scores(x * inv_t, ok, neg_log_e), start + tl.arange(0, SCAN))
        at = tl.where(score > best, v, at)
        best = tl.maximum(score, best)
    return best, at
