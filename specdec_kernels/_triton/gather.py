"""Thresholds that a few blocks do not give: a bracket from a sample of the row, one more pass, an exact end.

The sample, 64 blocks spread evenly over the row, says between which two logits (low, high) the threshold must lie, up
to some standard deviations. The pass sums what lies above, counts the ties at both ends and keeps what lies strictly
between; each tile has a place of its own, so nothing depends on an order. A bracket that turns out wrong costs a scan
of the row by one program, never a wrong result.
"""

import triton
import triton.language as tl

from .digest import Digest
from .launch import entry
from .noise import BLOCK
from .plan import row_of
from .records import OPEN, Q_FIELDS, Q_STATE, R_MASS, R_MAX, get_record_f, get_record_i, weights
from .rows import Rows, fact, key_of, load_asked, logits_of_blocks, sampling_of, value_of
from .thresholds import (
    TAKEN,
    UNIT,
    edge_of,
    key_above,
    kth_of,
    load_listed,
    lowest_key,
    mass_of,
    min_p_threshold,
    place_above,
    sums,
    sums_of,
    units,
)

# Sums of a tile of an open row, int64: how many lie inside, above, at the high and at the low end; mass and entropy sum
# above; mass from the min-p threshold on; mass inside.
S_IN, S_ABOVE, S_HIGH, S_LOW, S_MASS, S_ENTROPY, S_FLOOR, S_INSIDE, S_FIELDS = (tl.constexpr(i) for i in range(9))
DEVIATIONS = tl.constexpr(4.0)
ROOM = tl.constexpr(0.8)  # of a list, that a bracket may be expected to fill
SAMPLED, COPIED = tl.constexpr(64), tl.constexpr(8)  # blocks in all, and at once
TILES = tl.constexpr(64)  # tiles whose sums are added up at once
TOGETHER = tl.constexpr(4)  # tiles whose lists are moved at once
SHARE = tl.constexpr(8)  # a tile lists at most one of so many of its ids


@triton.jit
def _estimate(sample, key, whole, each, maximum, inv_t):
    """(estimate, deviation) of the mass at or above a key; `each` sampled logit stands for so many. 1 / T = 0 counts.

    It is estimated from the sampled logits above the key, and as the whole less those below it, weighted by how little
    each varies. A logit that the sample missed may weigh as much as the largest, or as the key itself: four such are
    allowed for on each side.
    """
    above, below = tl.zeros([TAKEN], tl.float32), tl.zeros([TAKEN], tl.float32)
    var_above, var_below = tl.zeros([TAKEN], tl.float32), tl.zeros([TAKEN], tl.float32)
    for start in range(0, SAMPLED * BLOCK, TAKEN):
        x = load_listed(sample, start, SAMPLED * BLOCK, TAKEN)
        w = weights(x, maximum, inv_t)
        over = tl.where(key_of(x) >= key, w, 0.0)
        under = w - over
        above, below = above + over, below + under
        var_above, var_below = var_above + over * over, var_below + under * under
    above, below = sums(above, below)
    var_above, var_below = sums(var_above, var_below)
    here = weights(value_of(key), maximum, inv_t)
    var_above, var_below = var_above + 4.0, var_below + 4.0 * here * here
    share = var_below / tl.maximum(var_above + var_below, 1e-30)
    estimate = share * each * above + (1.0 - share) * (whole - each * below)
    return estimate, each * tl.sqrt(var_above * share)


@triton.jit
def _bound(sample, need, whole, each, low, high, maximum, inv_t, deviations):
    """Largest key in [low, high] whose estimated mass, some deviations added, is >= need; low if none."""
    last = place_above(high, low, sample)
    first = last * 0
    while first < last:
        middle = last - ((last - first) >> 1)
        mass, deviation = _estimate(sample, key_above(middle, low, sample), whole, each, maximum, inv_t)
        enough = mass + deviations * deviation >= need
        first, last = tl.where(enough, middle, first), tl.where(enough, last, middle - 1)
    return key_above(first, low, sample)


@triton.jit
def _take_sample(view, sample):
    """(logits of the row that each sampled one stands for, logits that are finite), after SAMPLED blocks are copied."""
    count = (view.rows.vocab + BLOCK - 1) // BLOCK
    seen, finite = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, SAMPLED, COPIED):
        j = start + tl.arange(0, COPIED)
        block = j * tl.maximum(count, SAMPLED) // SAMPLED  # past the end in a row of fewer blocks
        _ids, there, x = logits_of_blocks(view.rows, view.offset, view.number, block, block >= 0)
        at = j[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(sample + at, x.to(sample.dtype.element_ty))
        seen += tl.sum(tl.sum(there.to(tl.int32), axis=1), axis=0)
        finite += tl.sum(tl.sum((x > float("-inf")).to(tl.int32), axis=1), axis=0)
    tl.debug_barrier()
    each = view.rows.vocab / tl.maximum(seen, 1).to(tl.float32)
    return each, each * finite.to(tl.float32)


@triton.jit
def open_row(digest, view, work, row, law, settings):
    """Bracket the threshold of a row, for `gather_kernel`.

    The sample lies in the row's list and is read at each step: few rows come here, and all would pay for its registers.
    """
    maximum, total = law
    inv_t, t, k, p, floor = settings.inv_t, settings.t, settings.k, settings.p, settings.floor
    sample = work.listed + row * work.capacity
    each, all_ids = _take_sample(view, sample)
    bottom, top = lowest_key() + 1, key_of(maximum)
    least = key_of(min_p_threshold(maximum, t, floor))
    # Without top-k and top-p nothing is searched: everything above `least - 1` is kept.
    low, high = tl.minimum(least, top) - 1, tl.minimum(least, top) - 1
    deviations, tries = tl.full([], DEVIATIONS, tl.float32), tl.full([], 2, tl.int32)
    while tries > 0:
        low_k, high_k = least, least
        if k > 0:
            high_k = _bound(sample, k, all_ids, each, bottom, top, maximum, 0.0, deviations)
            low_k = _bound(sample, k, all_ids, each, bottom, high_k, maximum, 0.0, -deviations)
            low, high = low_k, high_k
        if p < 1:
            most, fewest = total, total
            if (k > 0) | (floor > 0):
                # The mass that top-p refers to is itself known only within bounds.
                low_k, high_k = tl.maximum(low_k, least), tl.maximum(high_k, least)
                mass, deviation = _estimate(sample, low_k, total, each, maximum, inv_t)
                most = tl.minimum(mass + deviations * deviation, total)
                mass, deviation = _estimate(sample, high_k, total, each, maximum, inv_t)
                fewest = tl.minimum(tl.maximum(mass - deviations * deviation, 1.0), most)
            high_p = _bound(sample, p * fewest, total, each, bottom, top, maximum, inv_t, deviations)
            low_p = _bound(sample, p * most, total, each, bottom, high_p, maximum, inv_t, -deviations)
            low = tl.where(k > 0, tl.minimum(low, low_p), low_p)
            high = tl.where(k > 0, tl.maximum(high, high_p), high_p)
        # Where ids crowd, a bracket that misses now and then costs less than one whose list never fits.
        crowd, _ = _estimate(sample, low + 1, all_ids, each, maximum, 0.0)
        above, _ = _estimate(sample, high, all_ids, each, maximum, 0.0)
        share = (crowd - above) / (ROOM * work.capacity)
        deviations = deviations / tl.maximum(share, 1.0)
        tries = tl.where(share > 1.0, tries - 1, 0)
    tl.store(work.bracket + row * 2, low)
    tl.store(work.bracket + row * 2 + 1, high)
    tl.store(digest.record_i + row * Q_FIELDS + Q_STATE, OPEN)


@triton.jit
def _gather_tile(
    digest, work, rows, row, tile, offset, number, settings, ENTROPY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Sums and list of one tile of an open row."""
    inv_t = settings.inv_t
    start = tile * TILE
    maximum = get_record_f(digest, row, R_MAX, row >= 0)
    x = load_asked(rows, offset, number, start, TILE)
    low, high = tl.load(work.bracket + row * 2), tl.load(work.bracket + row * 2 + 1)
    key = key_of(x)
    real = x > float("-inf")
    above = real & (key > high)
    inside = real & (key > low) & (key < high)
    mass = (weights(x, maximum, inv_t) * UNIT).to(tl.int64)
    at = row * digest.tiles + tile
    sums = work.sums + at * S_FIELDS
    tl.store(sums + S_IN, tl.sum(inside.to(tl.int32), axis=0))
    tl.store(sums + S_ABOVE, tl.sum(above.to(tl.int32), axis=0))
    tl.store(sums + S_HIGH, tl.sum((real & (key == high)).to(tl.int32), axis=0))
    tl.store(sums + S_LOW, tl.sum((real & (key == low) & (low < high)).to(tl.int32), axis=0))
    tl.store(sums + S_MASS, tl.sum(tl.where(above, mass, 0), axis=0))
    tl.store(sums + S_INSIDE, tl.sum(tl.where(inside, mass, 0), axis=0))
    least = key_of(min_p_threshold(maximum, settings.t, settings.floor))
    tl.store(sums + S_FLOOR, tl.sum(tl.where(real & (key >= least), mass, 0), axis=0))
    entropy = tl.full([], 0, tl.int64)
    if ENTROPY:
        w = weights(x, maximum, inv_t)
        z = tl.where(above & (w > 0), (x - maximum) * inv_t, 0.0)
        entropy = tl.sum((w * z * UNIT).to(tl.int64), axis=0)
    tl.store(sums + S_ENTROPY, entropy)
    place = tl.cumsum(inside.to(tl.int32), axis=0) - 1
    listed = work.gathered + at * (TILE // SHARE)
    tl.store(listed + place, x.to(listed.dtype.element_ty), mask=inside & (place < TILE // SHARE))


@entry
def gather_kernel(
    digest, plan, work, draft_work, target, draft, sampling, draft_sampling, count, tiles, vocab, draft_vocab, NT, ND,
    parts, ENTROPY: tl.constexpr, FILTERS: tl.constexpr, DRAFT_FILTERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Reads open rows once more. Grid: rows * parts, each every parts-th tile; programs of other rows leave at once."""
    digest, target = Digest(count, tiles, *digest[2:]), Rows(vocab, *target[1:])
    pid = tl.program_id(0).to(tl.int64)
    row = pid // parts
    b = row // (NT + ND)
    is_target = row % (NT + ND) < NT
    if get_record_i(digest, row, Q_STATE, row >= 0) == OPEN:
        planned = row_of(plan, row)
        offset, number = planned.offset, planned.number
        if offset >= 0:  # else nobody wrote a record
            first = (pid % parts).to(tl.int32)
            if is_target:
                if FILTERS:
                    settings = sampling_of(sampling, b, target.vocab)
                    for tile in range(first, tiles, parts):
                        _gather_tile(digest, work, target, row, tile, offset, number, settings, ENTROPY, TILE)
            else:
                if DRAFT_FILTERS:
                    rows = Rows(draft_vocab, *draft[1:])
                    settings = sampling_of(draft_sampling, b, draft_vocab)
                    for tile in range(first, tiles, parts):
                        _gather_tile(digest, draft_work, rows, row, tile, offset, -1 - number, settings, False, TILE)


@triton.jit
def _sum_of(digest, work, row, tiles, field: tl.constexpr):
    """A sum over the tiles of a row."""
    total = tl.full([], 0, tl.int64)
    for start in range(0, tiles, TILES):
        t = start + tl.arange(0, TILES)
        at = work.sums + (row * digest.tiles + t) * S_FIELDS + field
        total += tl.sum(tl.load(at, mask=t < tiles, other=0), axis=0)
    return total


@triton.jit
def _move_lists(digest, work, row, tiles, listed, TILE: tl.constexpr):
    """(how many lie inside the bracket, whether all of them are in the row's list now)."""
    found = tl.full([], 0, tl.int32)
    fits = tl.full([], 1, tl.int32)
    j = tl.arange(0, TILE // SHARE)
    tl.debug_barrier()
    for start in range(0, tiles, TOGETHER):
        t = start + tl.arange(0, TOGETHER)
        at = row * digest.tiles + t
        count = tl.load(work.sums + at * S_FIELDS + S_IN, mask=t < tiles, other=0).to(tl.int32)
        fits = tl.where(tl.max(count, axis=0) > TILE // SHARE, 0, fits)
        count = tl.minimum(count, TILE // SHARE)
        place = (found + tl.cumsum(count, axis=0) - count)[:, None] + j[None, :]
        on = j[None, :] < count[:, None]
        x = tl.load(work.gathered + at[:, None] * (TILE // SHARE) + j[None, :], mask=on, other=0.0)
        tl.store(listed + place, x, mask=on & (place < work.capacity))
        found += tl.sum(count, axis=0)
    tl.debug_barrier()
    return found, fact((fits > 0) & (found <= work.capacity))


@triton.jit
def close_row(digest, work, row, vocab, settings, TILE: tl.constexpr):
    """(threshold, mass, entropy sum, closed) of an open row: exact, or not closed if the bracket was wrong."""
    inv_t, t, k, p, floor = settings.inv_t, settings.t, settings.k, settings.p, settings.floor
    maximum = get_record_f(digest, row, R_MAX, row >= 0)
    total = get_record_f(digest, row, R_MASS, row >= 0)
    low, high = tl.load(work.bracket + row * 2), tl.load(work.bracket + row * 2 + 1)
    tiles = (vocab + TILE - 1) // TILE
    listed = work.listed + row * work.capacity
    n, closed = _move_lists(digest, work, row, tiles, listed, TILE)
    n_in, n_above = _sum_of(digest, work, row, tiles, S_IN), _sum_of(digest, work, row, tiles, S_ABOVE)
    n_high, n_low = _sum_of(digest, work, row, tiles, S_HIGH), _sum_of(digest, work, row, tiles, S_LOW)
    mass_above = _sum_of(digest, work, row, tiles, S_MASS)
    mass_in = _sum_of(digest, work, row, tiles, S_INSIDE)
    mass_high = units(value_of(high), maximum, inv_t) * n_high
    mass_low = units(value_of(low), maximum, inv_t) * n_low
    least = key_of(min_p_threshold(maximum, t, floor))
    threshold = tl.minimum(least, key_of(maximum))
    n = tl.where(closed, n, 0)
    if k > 0:
        closed = closed & (n_above < k) & (n_above + n_high + n_in + n_low >= k)
        kth = tl.where(
            n_above + n_high + n_in >= k, kth_of(listed, n, k - n_above - n_high, -1, low + 1, high, TAKEN), low
        )
        kth = tl.where(n_above + n_high >= k, high, kth)
        threshold = tl.maximum(threshold, kth)
    if p < 1:
        whole = total.to(tl.float64) * UNIT
        if floor > 0:
            whole = _sum_of(digest, work, row, tiles, S_FLOOR).to(tl.float64)
        if (k > 0) & (threshold > least):
            closed = closed & (threshold <= high)
            kept = mass_above + mass_high
            kept += mass_of(listed, n, threshold, maximum, inv_t)
            whole = tl.where(threshold <= low, kept + mass_low, kept).to(tl.float64)
        need = whole * p.to(tl.float64)
        closed = closed & ((mass_above.to(tl.float64) < need) | (high == key_of(maximum)))
        reach = mass_above + mass_high
        closed = closed & ((reach + mass_in + mass_low).to(tl.float64) >= need)
        edge = edge_of(listed, n, need - reach.to(tl.float64), low + 1, high, maximum, inv_t)
        edge = tl.where((reach + mass_in).to(tl.float64) >= need, edge, low)
        edge = tl.where(reach.to(tl.float64) >= need, high, edge)
        threshold = tl.maximum(threshold, edge)
    closed = closed & (threshold >= low) & (threshold <= high + 1)
    inner, zsum = sums_of(listed, n, threshold, maximum, inv_t)
    kept = mass_above + inner
    zsum += _sum_of(digest, work, row, tiles, S_ENTROPY)
    with_high, with_low = threshold <= high, threshold <= low
    z_high = ((value_of(high) - maximum) * inv_t * mass_high.to(tl.float32)).to(tl.int64)
    z_low = ((value_of(low) - maximum) * inv_t * mass_low.to(tl.float32)).to(tl.int64)
    kept += tl.where(with_high, mass_high, 0) + tl.where(with_low, mass_low, 0)
    zsum += tl.where(with_high & (mass_high > 0), z_high, 0) + tl.where(with_low & (mass_low > 0), z_low, 0)
    scale = 1.0 / UNIT
    return value_of(threshold), kept.to(tl.float32) * scale, zsum.to(tl.float32) * scale, fact(closed)
