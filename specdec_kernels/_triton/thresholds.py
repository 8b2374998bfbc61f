"""min-p, top-k, top-p as one threshold and one mass a row, exact at ties, from a few blocks of the row.

The k-th largest of the blocks' maxima is a lower bound of the k-th largest logit, and every logit at or above a bound
lies in a block whose maximum is. So a bound, the blocks that reach it and a list of their logits that do are enough,
unless the list grows long (gather.py). Masses are summed as integers (2^-40 of the largest weight): a search by
bisection is monotone, and no sum depends on an order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .noise import BLOCK, log
from .records import weights
from .rows import key_of, logits_at, logits_of_blocks, value_of
from .visit import GROUPS, SPAN, next_blocks, span_maxima

UNIT = tl.constexpr(1099511627776.0)  # 2^40
SCAN = tl.constexpr(1024)  # ids that a lone program takes at once where it reads a row
SHORT = tl.constexpr(2048)  # most logits that are listed from blocks
MOST_BLOCKS = tl.constexpr(512)  # most blocks whose maxima have to reach a bound


class Work(NamedTuple):
    """Scratch of the filters; logits in their dtype."""

    listed: Any  # [rows, capacity]
    capacity: Any
    bracket: Any  # int32 [rows, 2], the rest see gather.py
    sums: Any  # int64 [rows, tiles, S_FIELDS]
    gathered: Any  # [rows, tiles, TILE / 8]


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
def _level(blocks, count, want, top):
    """A key that at least `want` of the maxima of the blocks reach, and not many more; the lowest if there is none."""
    low, high = lowest_key().to(tl.int64), top.to(tl.int64)
    lane = tl.arange(0, SPAN)
    while low < high:
        middle = low + (high - low + 1) // 2
        least = value_of(middle.to(tl.int32))
        reach = tl.full([], 0, tl.int32)
        for start in range(0, count, SPAN):
            x = tl.load(blocks + start + lane, mask=start + lane < count, other=float("-inf")).to(tl.float32)
            reach += tl.sum((x >= least).to(tl.int32), axis=0)
        enough = reach >= want
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        high = tl.where(enough & (reach <= want + want // 4 + 8), low, high)
    return low.to(tl.int32)


@triton.jit
def _collect(view, low, listed, most):
    """How many logits of a row are >= low, all listed unless there are more than `most`."""
    SIZE: tl.constexpr = GROUPS * BLOCK
    count = (view.rows.vocab + BLOCK - 1) // BLOCK
    found = tl.full([], 0, tl.int32)
    tl.debug_barrier()  # who still reads an earlier list
    for start in range(0, count, SPAN):
        maxima = span_maxima(view.blocks, start, count)
        going = tl.where(found <= most, 1, 0)
        while going > 0:
            block, chosen, maxima = next_blocks(maxima, low, start)
            going = tl.max(chosen.to(tl.int32), axis=0)
            if going > 0:
                _ids, _there, x = logits_of_blocks(view.rows, view.offset, view.number, block, chosen)
                x = tl.reshape(x, (SIZE,))
                on = (x >= low) & (x > float("-inf"))
                place = found + tl.cumsum(on.to(tl.int32), axis=0) - 1
                tl.store(listed + place, x.to(listed.dtype.element_ty), mask=on & (place < most))
                found += tl.sum(on.to(tl.int32), axis=0)
                going = tl.where(found <= most, 1, 0)
    tl.debug_barrier()
    return found


@triton.jit
def _load_listed(listed, start, n):
    at = start + tl.arange(0, SPAN)
    return tl.load(listed + at, mask=at < n, other=float("-inf")).to(tl.float32)


@triton.jit
def mass_of(listed, n, key, maximum, inv_t):
    """(mass, entropy sum), in units, of the listed logits whose key is at least this."""
    mass, zsum = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for start in range(0, n, SPAN):
        x = _load_listed(listed, start, n)
        x = tl.where(key_of(x) >= key, x, float("-inf"))
        w = weights(x, maximum, inv_t)
        z = tl.where(w > 0, (x - maximum) * inv_t, 0.0)
        mass += tl.sum((w * UNIT).to(tl.int64), axis=0)
        zsum += tl.sum((w * z * UNIT).to(tl.int64), axis=0)
    return mass, zsum


@triton.jit
def kth_of(listed, n, k, low, high):
    """Largest key in [low, high] that at least k of the listed logits reach; low if none."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reach = tl.full([], 0, tl.int32)
        for start in range(0, n, SPAN):
            reach += tl.sum((key_of(_load_listed(listed, start, n)) >= middle.to(tl.int32)).to(tl.int32), axis=0)
        low, high = tl.where(reach >= k, middle, low), tl.where(reach >= k, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def edge_of(listed, n, need, low, high, maximum, inv_t):
    """Largest key in [low, high] such that the listed logits from there on weigh at least `need`; low if none."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = mass_of(listed, n, middle.to(tl.int32), maximum, inv_t)[0].to(tl.float64) >= need
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def from_blocks(view, listed, law, how):
    """(threshold, mass, entropy sum, found): the filters of one row, if few of its blocks are enough.

    law = (maximum, mass of the whole row); how = (1 / T, T, top_k, top_p, min_p).
    """
    maximum, total = law
    inv_t, t, k, p, floor = how
    top, least = key_of(maximum), key_of(min_p_threshold(maximum, t, floor))
    count = (view.rows.vocab + BLOCK - 1) // BLOCK
    by_floor = (k == 0) & (floor > 0)  # then it is the bound
    want = tl.where(k > 0, k, 32)
    key, low = least, least
    n = tl.full([], 0, tl.int32)
    found = tl.full([], 0, tl.int32)
    going = tl.where(k <= MOST_BLOCKS, 1, 0)
    while going > 0:
        low = least
        if by_floor == 0:
            low = tl.maximum(least, _level(view.blocks, count, want, top))
        n = _collect(view, value_of(low), listed, SHORT)
        going = tl.full([], 0, tl.int32)
        if n <= SHORT:
            key = least
            found = tl.full([], 1, tl.int32)
            if (k > 0) & (n >= k):
                key = tl.maximum(key, kth_of(listed, n, k, low, top))
            if p < 1:
                whole = total.to(tl.float64) * UNIT
                if (k > 0) | (floor > 0):
                    whole = mass_of(listed, n, key, maximum, inv_t)[0].to(tl.float64)
                need = whole * p.to(tl.float64)
                if (k == 0) & (floor <= 0):
                    found = tl.where(mass_of(listed, n, low, maximum, inv_t)[0].to(tl.float64) >= need, 1, 0)
                    going = tl.where((found == 0) & (want < MOST_BLOCKS), 1, 0)
                if found > 0:
                    key = tl.maximum(key, edge_of(listed, n, need, tl.maximum(key, low), top, maximum, inv_t))
        want = want * 4
    key = tl.minimum(key, top)
    mass, zsum = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if found > 0:
        mass, zsum = mass_of(listed, n, key, maximum, inv_t)
    scale = 1.0 / UNIT
    return value_of(key), mass.to(tl.float32) * scale, zsum.to(tl.float32) * scale, found


@triton.jit
def _scan(view, low, maximum, inv_t):
    """(count, mass, entropy sum) of the logits of a row whose key is >= low, in units."""
    count = tl.full([], 0, tl.int64)
    mass = tl.full([], 0, tl.int64)
    zsum = tl.full([], 0, tl.int64)
    for start in range(0, view.rows.vocab, SCAN):
        v = start + tl.arange(0, SCAN)
        x = logits_at(view.rows, view.offset, view.number, v, v < view.rows.vocab)
        on = (key_of(x) >= low.to(tl.int32)) & (x > float("-inf"))
        w = weights(x, maximum, inv_t)
        z = tl.where(on & (w > 0), (x - maximum) * inv_t, 0.0)
        count += tl.sum(on.to(tl.int64), axis=0)
        mass += tl.sum(tl.where(on, (w * UNIT).to(tl.int64), 0), axis=0)
        zsum += tl.sum(tl.where(on, (w * z * UNIT).to(tl.int64), 0), axis=0)
    return count, mass, zsum


@triton.jit
def by_scanning(view, maximum, how):
    """(threshold, mass, entropy sum) of one row by bisection over the whole row: exact, slow, rarely needed."""
    inv_t, t, k, p, floor = how
    lowest = lowest_key().to(tl.int64)
    top = key_of(maximum).to(tl.int64)
    threshold = key_of(min_p_threshold(maximum, t, floor)).to(tl.int64)
    if k > 0:
        low, high = lowest, top
        while low < high:
            middle = low + (high - low + 1) // 2
            count, _, _ = _scan(view, middle, maximum, inv_t)
            low, high = tl.where(count >= k, middle, low), tl.where(count >= k, high, middle - 1)
        threshold = tl.maximum(threshold, low)
    threshold = tl.minimum(threshold, top)
    if p < 1:
        _, whole, _ = _scan(view, threshold, maximum, inv_t)
        need = whole.to(tl.float64) * p.to(tl.float64)
        low, high = threshold, top
        while low < high:
            middle = low + (high - low + 1) // 2
            _, mass, _ = _scan(view, middle, maximum, inv_t)
            enough = mass.to(tl.float64) >= need
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        threshold = low
    _, mass, zsum = _scan(view, threshold, maximum, inv_t)
    scale = 1.0 / UNIT
    return value_of(threshold.to(tl.int32)), mass.to(tl.float32) * scale, zsum.to(tl.float32) * scale
