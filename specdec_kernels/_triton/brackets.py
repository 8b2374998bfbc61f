# ruff: noqa: RUF059 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""Thresholds that lie below the lists: a bracket from a sample of the row, then one more pass that closes it.

Pass 1 keeps one random id of every 32. The sample says between which two logits [low, high] the threshold must lie,
up to 3.5 standard deviations. Pass 2 counts and sums what lies above, counts the ties at both ends, and gathers what
lies strictly between: at most a few thousand logits, in which the threshold is found exactly. A bracket that turns
out wrong (about one hard row in two thousand) costs a scan of the row, never a wrong result.
All sums are integers, so they may be added atomically in any order.
"""

import triton
import triton.language as tl

from .filters import SCAN, UNIT, edge_in, kth_in, load_lists, lowest_key, mass_from, min_p_threshold, units
from .laws import law_of
from .noise import noise_of, tile_noise
from .race import better, race_scores, winner
from .rows import fact, key_of, load_logits, mask_allowed, value_of
from .stats import (
    F_CUT,
    F_MAX,
    F_SCORE,
    F_SUM,
    I_ARG,
    I_RANK,
    I_WINNER,
    OPEN,
    Q_FIELDS,
    Q_STATE,
    R_MASS,
    get_f,
    get_i,
    get_record_f,
    put_f,
    put_i,
    weights,
)  # fmt: skip

# Sums of an open row, int64: gathered, above, ties at the high and the low end; mass and entropy sum above; mass from
# the min-p threshold on; mass inside.
N_IN, N_ABOVE, N_HIGH, N_LOW, N_MASS, N_ENTROPY, N_FLOOR, N_INSIDE = (tl.constexpr(i) for i in range(8))
DEVIATIONS = tl.constexpr(3.5)


@triton.jit
def sample_tile(ws, lists, row, tile, x, TILE: tl.constexpr):
    """Keep one id of each of the tile's interleaved strata of 32, chosen by a hash of its place."""
    STRATA: tl.constexpr = TILE // 32
    s = tl.arange(0, STRATA)
    hashed = ((tile * STRATA + s + 1).to(tl.uint32) * 2654435761) >> 27
    chosen = tl.arange(0, 32)[:, None] == hashed.to(tl.int32)[None, :]
    x = tl.max(tl.where(chosen, tl.reshape(x, [32, STRATA]), float("-inf")), axis=0)
    at = (row * ws.tiles + tile) * STRATA + s
    tl.store(lists.samples + at, x.to(lists.samples.dtype.element_ty))


@triton.jit
def _estimate(key, listed, listed_w, keys, w, w_cut, whole, maximum, inv_t):
    """(estimate, deviation) of the mass at or above a key.

    What is listed is known; the rest is estimated from the sampled ids above the key, and as the whole less those
    below it, weighted by how little each varies. With all weights 1 it is a count. An id that the sample missed may
    weigh as much as the largest that is not listed, or as the key itself: four such are allowed for on each side.
    """
    above = keys >= key
    seen = tl.sum(tl.where(listed >= key, listed_w, 0.0), axis=0)
    unseen = tl.sum(tl.where(listed >= key, 0.0, listed_w), axis=0)
    by_above = seen + 32.0 * tl.sum(tl.where(above, w, 0.0), axis=0)
    by_below = whole - unseen - 32.0 * tl.sum(tl.where(above, 0.0, w), axis=0)
    here = tl.minimum(weights(value_of(key), maximum, inv_t), w_cut)
    var_above = tl.sum(tl.where(above, w * w, 0.0), axis=0) + 4.0 * w_cut * w_cut
    var_below = tl.sum(tl.where(above, 0.0, w * w), axis=0) + 4.0 * here * here
    share = var_below / tl.maximum(var_above + var_below, 1e-30)
    return share * by_above + (1.0 - share) * by_below, 32.0 * tl.sqrt(var_above * share)


@triton.jit
def _bound(need, listed, listed_w, keys, w, w_cut, whole, low, high, maximum, inv_t, SIGN: tl.constexpr):
    """Largest key in [low, high] whose estimated mass, SIGN * 3.5 deviations added, is >= need; low if none."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        mass, deviation = _estimate(middle.to(tl.int32), listed, listed_w, keys, w, w_cut, whole, maximum, inv_t)
        enough = mass + SIGN * DEVIATIONS * deviation >= need
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def open_row(ws, lists, row, law, sampling, T_PAD: tl.constexpr, LISTED: tl.constexpr, STRATA: tl.constexpr):
    """Bracket the threshold of a row that its lists could not settle, and clear its sums."""
    maximum, total = law
    inv_t, t, k, p, floor = sampling
    cuts = get_f(ws, F_CUT, row, T_PAD, float("-inf"))
    lane = tl.arange(0, T_PAD)
    s = tl.arange(0, STRATA)
    at = (row * ws.tiles + lane[:, None]) * STRATA + s[None, :]
    mask = tl.broadcast_to(lane[:, None] < ws.tiles, [T_PAD, STRATA])
    x = tl.load(lists.samples + at, mask=mask, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    # What is listed is counted exactly; the sample stands for the rest.
    x = tl.reshape(tl.where(x < cuts[:, None], x, float("-inf")), [T_PAD * STRATA])
    w = weights(x, maximum, inv_t)
    cut = tl.max(tl.where(cuts < float("inf"), cuts, float("-inf")), axis=0)
    cut = tl.where(tl.max(cuts, axis=0) == float("inf"), maximum, cut)
    w_cut = weights(cut, maximum, inv_t)
    listed = load_lists(ws, lists, row, T_PAD, LISTED)
    listed_w = weights(listed, maximum, inv_t)
    keys, listed = key_of(x), key_of(listed)
    bottom, top = lowest_key() + 1, key_of(maximum)
    least = key_of(min_p_threshold(maximum, t, floor))
    # Without top-k and top-p nothing is searched: everything above `least - 1` is kept.
    low, high = tl.minimum(least, top) - 1, tl.minimum(least, top) - 1
    low_k, high_k = least, least
    if k > 0:
        one, listed_one = (x > float("-inf")).to(tl.float32), (listed > lowest_key()).to(tl.float32)
        count = tl.sum(listed_one, axis=0) + 32.0 * tl.sum(one, axis=0)
        high_k = _bound(k, listed, listed_one, keys, one, 1.0, count, bottom, top, maximum, 0.0, 1.0)
        low_k = _bound(k, listed, listed_one, keys, one, 1.0, count, bottom, high_k, maximum, 0.0, -1.0)
        low, high = low_k, high_k
    if p < 1:
        most, fewest = total, total
        if (k > 0) | (floor > 0):
            # The mass that top-p refers to is itself known only within bounds.
            low_k, high_k = tl.maximum(low_k, least), tl.maximum(high_k, least)
            mass, deviation = _estimate(low_k, listed, listed_w, keys, w, w_cut, total, maximum, inv_t)
            most = tl.minimum(mass + DEVIATIONS * deviation, total)
            mass, deviation = _estimate(high_k, listed, listed_w, keys, w, w_cut, total, maximum, inv_t)
            fewest = tl.minimum(tl.maximum(mass - DEVIATIONS * deviation, 1.0), most)
        high_p = _bound(p * fewest, listed, listed_w, keys, w, w_cut, total, bottom, top, maximum, inv_t, 1.0)
        low_p = _bound(p * most, listed, listed_w, keys, w, w_cut, total, bottom, high_p, maximum, inv_t, -1.0)
        low = tl.where(k > 0, tl.minimum(low, low_p), low_p)
        high = tl.where(k > 0, tl.maximum(high, high_p), high_p)
    tl.store(lists.bracket + row * 2, low)
    tl.store(lists.bracket + row * 2 + 1, high)
    tl.store(lists.sums + row * 8 + tl.arange(0, 8), tl.zeros([8], tl.int64))
    tl.store(ws.record_i + row * Q_FIELDS + Q_STATE, OPEN)


@triton.jit
def _add(lists, row, field: tl.constexpr, amount):
    tl.atomic_add(lists.sums + row * 8 + field, amount.to(tl.int64), sem="relaxed")


@triton.jit
def gather_tile(
    ws, lists, rows, offset, bits, row, tile, sampling, noise, b, position,
    RACE: tl.constexpr, PURPOSE: tl.constexpr, ENTROPY: tl.constexpr, TILE: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Sum what lies above the bracket of an open row, gather what lies inside, and race what is kept for certain."""
    inv_t, t, k, p, floor = sampling
    start = tile * TILE
    v = start + tl.arange(0, TILE)
    maximum = law_of(ws, row)[0]
    x = mask_allowed(load_logits(rows, offset, start, TILE), rows, bits, start, TILE)
    low, high = tl.load(lists.bracket + row * 2), tl.load(lists.bracket + row * 2 + 1)
    key = key_of(x)
    real = x > float("-inf")
    above = real & (key > high)
    inside = real & (key > low) & (key < high)
    w = weights(x, maximum, inv_t)
    mass = (w * UNIT).to(tl.int64)
    _add(lists, row, N_ABOVE, tl.sum(above.to(tl.int32), axis=0))
    _add(lists, row, N_HIGH, tl.sum((real & (key == high)).to(tl.int32), axis=0))
    _add(lists, row, N_LOW, tl.sum((real & (key == low) & (low < high)).to(tl.int32), axis=0))
    _add(lists, row, N_MASS, tl.sum(tl.where(above, mass, 0), axis=0))
    if ENTROPY:
        z = tl.where(above, (x - maximum) * inv_t, 0.0)
        _add(lists, row, N_ENTROPY, tl.sum((w * z * UNIT).to(tl.int64), axis=0))
    if floor > 0:
        least = key_of(min_p_threshold(maximum, t, floor))
        _add(lists, row, N_FLOOR, tl.sum(tl.where(real & (key >= least), mass, 0), axis=0))
    _add(lists, row, N_INSIDE, tl.sum(tl.where(inside, mass, 0), axis=0))
    inside_count = tl.sum(inside.to(tl.int32), axis=0)
    base = tl.atomic_add(lists.sums + row * 8 + N_IN, inside_count.to(tl.int64), sem="relaxed")
    place = base + tl.cumsum(inside.to(tl.int32), axis=0) - 1
    fits = inside & (place < GATHERED)
    at = row * GATHERED + place
    tl.store(lists.gathered + at, x.to(lists.gathered.dtype.element_ty), mask=fits)
    if RACE:
        tl.store(lists.gathered_ids + at, v, mask=fits)
        score = race_scores(x * inv_t, real, tile_noise(noise, b, position, PURPOSE, start, TILE))
        best, who = winner(tl.where(above, score, float("-inf")), v)
        put_f(ws, F_SCORE, row, tile, best)
        put_i(ws, I_WINNER, row, tile, who)
        best, who = winner(tl.where(key == high, score, float("-inf")), v)
        put_f(ws, F_SUM, row, tile, best)
        put_i(ws, I_RANK, row, tile, who)
        best, who = winner(tl.where((key == low) & (low < high), score, float("-inf")), v)
        put_f(ws, F_MAX, row, tile, best)
        put_i(ws, I_ARG, row, tile, who)


@triton.jit
def _sum_of(lists, row, field: tl.constexpr):
    return tl.load(lists.sums + row * 8 + field, cache_modifier=".cg")


@triton.jit
def load_gathered(lists, row, GATHERED: tl.constexpr):
    """Gathered logits as float32, -inf past their end."""
    j = tl.arange(0, GATHERED)
    ok = j < _sum_of(lists, row, N_IN)
    at = row * GATHERED + j
    return tl.load(lists.gathered + at, mask=ok, other=float("-inf"), cache_modifier=".cg").to(tl.float32)


@triton.jit
def _mass_gathered(lists, row, count, low, maximum, inv_t, GATHERED: tl.constexpr):
    """(mass, entropy sum), in units, of the gathered keys at or above `low`; in small blocks, to spare registers."""
    mass, zsum = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for start in range(0, count, SCAN):
        j = start + tl.arange(0, SCAN)
        at = row * GATHERED + j
        x = tl.load(lists.gathered + at, mask=j < count, other=float("-inf"), cache_modifier=".cg")
        more, z = mass_from(key_of(x.to(tl.float32)), low, maximum, inv_t)
        mass += more
        zsum += z
    return mass, zsum


@triton.jit
def close_row(ws, lists, row, sampling, ENTROPY: tl.constexpr, GATHERED: tl.constexpr):
    """(threshold, mass, entropy sum, closed) of an open row: exact, or not closed if the bracket was wrong."""
    inv_t, t, k, p, floor = sampling
    maximum = law_of(ws, row)[0]
    total = get_record_f(ws, row, R_MASS, row >= 0)
    low, high = tl.load(lists.bracket + row * 2), tl.load(lists.bracket + row * 2 + 1)
    n_in, n_above = _sum_of(lists, row, N_IN), _sum_of(lists, row, N_ABOVE)
    n_high, n_low = _sum_of(lists, row, N_HIGH), _sum_of(lists, row, N_LOW)
    mass_above = _sum_of(lists, row, N_MASS)
    mass_high = units(value_of(high), maximum, inv_t) * n_high
    mass_low = units(value_of(low), maximum, inv_t) * n_low
    keys = key_of(load_gathered(lists, row, GATHERED))
    count = tl.minimum(n_in, GATHERED).to(tl.int32)
    mass_in = _sum_of(lists, row, N_INSIDE)
    closed = n_in <= GATHERED
    least = key_of(min_p_threshold(maximum, t, floor))
    threshold = tl.minimum(least, key_of(maximum))
    inner, is_weighed = tl.full([], 0, tl.int64), row < 0  # mass inside the bracket that is kept, once known
    if k > 0:
        closed = closed & (n_above < k) & (n_above + n_high + n_in + n_low >= k)
        kth = tl.where(n_above + n_high + n_in >= k, kth_in(keys, k - n_above - n_high, low + 1, high), low)
        kth = tl.where(n_above + n_high >= k, high, kth)
        threshold = tl.maximum(threshold, kth)
    if p < 1:
        whole = total.to(tl.float64) * UNIT
        if floor > 0:
            whole = _sum_of(lists, row, N_FLOOR).to(tl.float64)
        if (k > 0) & (threshold > least):
            closed = closed & (threshold <= high)
            kept = mass_above + mass_high
            kept += _mass_gathered(lists, row, count, threshold, maximum, inv_t, GATHERED)[0]
            whole = tl.where(threshold <= low, kept + mass_low, kept).to(tl.float64)
        need = whole * p.to(tl.float64)
        closed = closed & ((mass_above < need) | (high == key_of(maximum)))
        reach = mass_above + mass_high
        closed = closed & ((reach + mass_in + mass_low).to(tl.float64) >= need)
        edge, inner = edge_in(keys, maximum, inv_t, need - reach.to(tl.float64), low + 1, high, mass_in)
        edge = tl.where((reach + mass_in).to(tl.float64) >= need, edge, low)
        edge = tl.where(reach.to(tl.float64) >= need, high, edge)
        inner = tl.where(edge == high, 0, tl.where(edge == low, mass_in, inner))
        is_weighed = edge >= threshold
        threshold = tl.maximum(threshold, edge)
    closed = closed & (threshold >= low) & (threshold <= high + 1)
    zsum = tl.full([], 0, tl.int64)
    if ENTROPY or (is_weighed == 0):
        inner, zsum = _mass_gathered(lists, row, count, threshold, maximum, inv_t, GATHERED)
    kept = mass_above + inner
    zsum += _sum_of(lists, row, N_ENTROPY)
    with_high, with_low = threshold <= high, threshold <= low
    z_high = ((value_of(high) - maximum) * inv_t * mass_high.to(tl.float32)).to(tl.int64)
    z_low = ((value_of(low) - maximum) * inv_t * mass_low.to(tl.float32)).to(tl.int64)
    kept += tl.where(with_high, mass_high, 0) + tl.where(with_low, mass_low, 0)
    zsum += tl.where(with_high & (n_high > 0), z_high, 0) + tl.where(with_low & (n_low > 0), z_low, 0)
    scale = 1.0 / UNIT
    return value_of(threshold), kept.to(tl.float32) * scale, zsum.to(tl.float32) * scale, fact(closed)


@triton.jit
def race_closed(
    ws, lists, row, threshold, inv_t, noise, b, position, PURPOSE: tl.constexpr, T_PAD: tl.constexpr,
    GATHERED: tl.constexpr,
):  # fmt: skip
    """(best score, id) of a closed row: above the bracket, at its ends, or inside."""
    low, high = tl.load(lists.bracket + row * 2), tl.load(lists.bracket + row * 2 + 1)
    best, at = tl.full([], float("-inf"), tl.float32), tl.full([], 0x7FFFFFFF, tl.int32)
    count = tl.minimum(_sum_of(lists, row, N_IN), GATHERED).to(tl.int32)
    for start in range(0, count, SCAN):
        j = start + tl.arange(0, SCAN)
        ok = j < count
        x = tl.load(lists.gathered + row * GATHERED + j, mask=ok, other=float("-inf"), cache_modifier=".cg")
        x = x.to(tl.float32)
        on = ok & (x >= threshold)
        v = tl.load(lists.gathered_ids + row * GATHERED + j, mask=on, other=0, cache_modifier=".cg")
        score = race_scores(x * inv_t, on, noise_of(noise, b, position, PURPOSE, v))
        score, who = winner(score, v)
        best, at = better(best, at, score, who, count > 0)
    score, who = winner(get_f(ws, F_SCORE, row, T_PAD, float("-inf")), get_i(ws, I_WINNER, row, T_PAD, 0x7FFFFFFF))
    best, at = better(best, at, score, who, threshold <= float("inf"))
    score, who = winner(get_f(ws, F_SUM, row, T_PAD, float("-inf")), get_i(ws, I_RANK, row, T_PAD, 0x7FFFFFFF))
    best, at = better(best, at, score, who, key_of(threshold) <= high)
    score, who = winner(get_f(ws, F_MAX, row, T_PAD, float("-inf")), get_i(ws, I_ARG, row, T_PAD, 0x7FFFFFFF))
    return better(best, at, score, who, key_of(threshold) <= low)
