"""min-p, top-k, top-p as one threshold and one mass a row, exact at ties, from a few blocks of the row.

The k-th largest of the blocks' maxima is a lower bound of the k-th largest logit, and every logit at or above a bound
lies in a block whose maximum is. So a bound, the blocks that reach it and a list of their logits that do are enough,
unless the list grows long (gather.py). A search tries three places a step, among the numbers of the logits' dtype.
Masses are summed as integers (2^-40 of the largest weight): a search is monotone, and no sum depends on an order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .noise import BLOCK, log
from .records import weights
from .rows import key_of, logits_at, value_of
from .visit import pick, picked_logits

UNIT = tl.constexpr(1099511627776.0)  # 2^40
SCAN = tl.constexpr(1024)  # ids that a lone program takes at once where it reads a row
SHORT = tl.constexpr(2048)  # most logits that are listed from blocks
FEW = tl.constexpr(2048 // 64)  # blocks that are listed whole
TAKEN = tl.constexpr(512)  # listed numbers that are taken at once; searches hold the first of them
MAXIMA = tl.constexpr(1024)  # maxima of blocks that are looked at together
LOOKED = tl.constexpr(16)  # blocks that are looked into at once
MOST_BLOCKS = tl.constexpr(512)  # most blocks whose maxima have to reach a bound


class Work(NamedTuple):
    """Scratch of the filters; logits in their dtype."""

    picked: Any  # int32 [rows, SPAN]: blocks that are looked into
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


@triton.constexpr_function
def _shift(dtype):
    """Low bits of the key of a float32 that no number of a dtype sets."""
    return {tl.float32: 0, tl.bfloat16: 16, tl.float16: 13}[dtype]


@triton.jit
def lowest_key():
    return key_of(tl.full([], float("-inf"), tl.float32))


@triton.jit
def _collect(view, low, picked, listed, most):
    """How many logits of a row are >= low, all listed unless there are more than `most`."""
    SIZE: tl.constexpr = LOOKED * BLOCK
    count = (view.rows.vocab + BLOCK - 1) // BLOCK
    found = tl.full([], 0, tl.int32)
    for start in range(0, count, MAXIMA):
        n = pick(view, start, count, low, picked, MAXIMA)
        first = tl.full([], 0, tl.int32)
        while (first < n) & (found <= most):
            x = tl.reshape(picked_logits(view, picked, first, n, LOOKED)[0], (SIZE,))
            on = (x >= low) & (x > float("-inf"))
            place = found + tl.cumsum(on.to(tl.int32), axis=0) - 1
            tl.store(listed + place, x.to(listed.dtype.element_ty), mask=on & (place < most))
            found += tl.sum(on.to(tl.int32), axis=0)
            first += LOOKED
    tl.debug_barrier()
    return found


@triton.jit
def _added(a, b, c, d):
    return a + c, b + d


@triton.jit
def _all_added(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def sums(a, b):
    """Two sums, for which threads wait once."""
    return tl.reduce((a, b), 0, _added)


@triton.jit
def load_listed(listed, start, n, SIZE: tl.constexpr):
    at = start + tl.arange(0, SIZE)
    return tl.load(listed + at, mask=at < n, other=float("-inf")).to(tl.float32)


@triton.jit
def _load_from(listed, start, n, key):
    """Listed numbers whose key is at least this, -inf in place of the others."""
    x = load_listed(listed, start, n, TAKEN)
    return tl.where(key_of(x) >= key, x, float("-inf"))


@triton.jit
def mass_of(listed, n, key, maximum, inv_t):
    """Mass, in units, of the listed logits whose key is at least this."""
    mass = tl.zeros([TAKEN], tl.int64)
    for start in range(0, n, TAKEN):
        mass += units(_load_from(listed, start, n, key), maximum, inv_t)
    return tl.sum(mass, axis=0)


@triton.jit
def sums_of(listed, n, key, maximum, inv_t):
    """(mass, entropy sum), likewise."""
    mass, zsum = tl.zeros([TAKEN], tl.int64), tl.zeros([TAKEN], tl.int64)
    for start in range(0, n, TAKEN):
        x = _load_from(listed, start, n, key)
        w = weights(x, maximum, inv_t)
        z = tl.where(w > 0, (x - maximum) * inv_t, 0.0)
        mass += (w * UNIT).to(tl.int64)
        zsum += (w * z * UNIT).to(tl.int64)
    return sums(mass, zsum)


@triton.jit
def places(key, numbers):
    """Numbers of keys among those of a dtype: no logit lies between two of them."""
    SHIFT: tl.constexpr = _shift(numbers.dtype.element_ty)
    return key >> SHIFT


@triton.jit
def key_at(place, numbers):
    """The key of a place, inverse of `places`."""
    SHIFT: tl.constexpr = _shift(numbers.dtype.element_ty)
    key = place.to(tl.int32) << SHIFT
    return tl.where(key < 0, key | ((1 << SHIFT) - 1), key)


@triton.jit
def place_above(key, low, numbers):
    """How many places above that of `low` keys lie, as uint32; 0 for those below."""
    return tl.where(key >= low, places(key, numbers) - places(low, numbers), 0).to(tl.uint32, bitcast=True)


@triton.jit
def _quarters(first, last):
    """Three places that cut those above `first` up to `last` in four."""
    n = last - first
    each, rest = n >> 2, n & 3
    a = first + each + tl.minimum(rest, 1)
    b = a + each + (rest > 1).to(tl.uint32)
    return a, b, b + each + (rest > 2).to(tl.uint32)


@triton.jit
def _narrowed(first, last, a, b, c, of_a, of_b, of_c, wanted):
    """The quarter of (first, last] where a measure, which falls, comes to what is wanted; its own at the new first."""
    low = tl.where(of_c >= wanted, c, tl.where(of_b >= wanted, b, tl.where(of_a >= wanted, a, first)))
    high = tl.where(of_a < wanted, a - 1, tl.where(of_b < wanted, b - 1, tl.where(of_c < wanted, c - 1, last)))
    return low, high, tl.where(of_c >= wanted, of_c, tl.where(of_b >= wanted, of_b, of_a))


@triton.jit
def key_above(n, low, numbers):
    """The key n places above that of `low`; `low` itself for 0."""
    return tl.where(n == 0, low, key_at(places(low, numbers) + n.to(tl.int32, bitcast=True), numbers))


@triton.jit
def _above_from(numbers, start, n, low, SIZE: tl.constexpr):
    return place_above(key_of(load_listed(numbers, start, n, SIZE)), low, numbers)


@triton.jit
def _reaching(above, a, b, c):
    """Three counts of 21 bits."""
    return (above >= a).to(tl.int64) + ((above >= b).to(tl.int64) << 21) + ((above >= c).to(tl.int64) << 42)


@triton.jit
def kth_of(numbers, n, k, slack, low, high, HELD: tl.constexpr):
    """Largest key in [low, high] that at least k of n numbers reach; low if none.

    With a slack, some such key that so many more may reach; -1: exact. HELD of the numbers are read once.
    """
    last = place_above(high, low, numbers)
    first = last * 0
    held = _above_from(numbers, 0, n, low, HELD)
    while first < last:
        a, b, c = _quarters(first, last)
        each = _reaching(held, a, b, c)
        for start in range(HELD, n, HELD):
            each += _reaching(_above_from(numbers, start, n, low, HELD), a, b, c)
        reach = tl.sum(each, axis=0)
        of_a, of_b, of_c = reach & 0x1FFFFF, (reach >> 21) & 0x1FFFFF, reach >> 42
        first, last, found = _narrowed(first, last, a, b, c, of_a, of_b, of_c, k)
        last = tl.where((of_a >= k) & (found <= k + slack), first, last)
    return key_above(first, low, numbers)


@triton.jit
def _weighed_from(listed, start, n, low, maximum, inv_t):
    x = load_listed(listed, start, n, TAKEN)
    return place_above(key_of(x), low, listed), units(x, maximum, inv_t)


@triton.jit
def _narrowed_to(first, last, a, b, c, masses, need):
    """The quarter where the sum of a mass comes to what is needed."""
    of_a, of_b, of_c = tl.reduce(masses, 0, _all_added)
    of_a, of_b, of_c = of_a.to(tl.float64), of_b.to(tl.float64), of_c.to(tl.float64)
    low, high, _ = _narrowed(first, last, a, b, c, of_a, of_b, of_c, need)
    return low, high


@triton.jit
def edge_of(listed, n, need, low, high, maximum, inv_t):
    """Largest key in [low, high] such that the listed logits from there on weigh at least `need`; low if none."""
    last = place_above(high, low, listed)
    first = last * 0
    held, held_mass = _weighed_from(listed, 0, n, low, maximum, inv_t)
    while first < last:
        a, b, c = _quarters(first, last)
        of_a, of_b, of_c = (
            tl.where(held >= a, held_mass, 0), tl.where(held >= b, held_mass, 0), tl.where(held >= c, held_mass, 0)
        )  # fmt: skip
        for start in range(TAKEN, n, TAKEN):
            above, mass = _weighed_from(listed, start, n, low, maximum, inv_t)
            of_a += tl.where(above >= a, mass, 0)
            of_b += tl.where(above >= b, mass, 0)
            of_c += tl.where(above >= c, mass, 0)
        first, last = _narrowed_to(first, last, a, b, c, (of_a, of_b, of_c), need)
    return key_above(first, low, listed)


@triton.jit
def from_blocks(view, picked, listed, law, settings):
    """(threshold, mass, entropy sum, found): the filters of one row, if few of its blocks are enough.

    law = (maximum, mass of the whole row).
    """
    maximum, total = law
    inv_t, t, k, p, floor = settings.inv_t, settings.t, settings.k, settings.p, settings.floor
    top, least = key_of(maximum), key_of(min_p_threshold(maximum, t, floor))
    count = (view.rows.vocab + BLOCK - 1) // BLOCK
    by_floor = (k == 0) & (floor > 0)  # then it is the bound
    want = tl.where(k > 0, k, 32)
    key, low = least, least
    n = tl.full([], 0, tl.int32)
    found = tl.full([], 0, tl.int32)
    going = tl.where(k <= MOST_BLOCKS, 1, 0)
    whole = total.to(tl.float64) * UNIT
    if (k == 0) & (floor <= 0) & (count > FEW):  # where all maxima weigh little, a list would run over
        reach = mass_of(view.blocks, count, lowest_key(), maximum, inv_t)
        going = tl.where(4 * reach.to(tl.float64) < whole * p.to(tl.float64), 0, going)
    while going > 0:
        low = least
        if by_floor == 0:
            low = tl.maximum(least, kth_of(view.blocks, count, want, want // 4 + 8, lowest_key(), top, MAXIMA))
        n = _collect(view, value_of(low), picked, listed, SHORT)
        going = tl.full([], 0, tl.int32)
        if n <= SHORT:
            key = least
            found = tl.full([], 1, tl.int32)
            if (k > 0) & (n >= k):
                key = tl.maximum(key, kth_of(listed, n, k, -1, low, top, TAKEN))
            if p < 1:
                if (k > 0) | (floor > 0):
                    whole = mass_of(listed, n, key, maximum, inv_t).to(tl.float64)
                need = whole * p.to(tl.float64)
                if (k == 0) & (floor <= 0):
                    found = tl.where(mass_of(listed, n, low, maximum, inv_t).to(tl.float64) >= need, 1, 0)
                    going = tl.where((found == 0) & (want < MOST_BLOCKS), 1, 0)
                if found > 0:
                    key = tl.maximum(key, edge_of(listed, n, need, tl.maximum(key, low), top, maximum, inv_t))
        want = want * 4
    key = tl.minimum(key, top)
    mass, zsum = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if found > 0:
        mass, zsum = sums_of(listed, n, key, maximum, inv_t)
    scale = 1.0 / UNIT
    return value_of(key), mass.to(tl.float32) * scale, zsum.to(tl.float32) * scale, found


@triton.jit
def _load_scanned(view, start):
    v = start + tl.arange(0, SCAN)
    return logits_at(view.rows, view.offset, view.number, v, v < view.rows.vocab)


@triton.jit
def _scan(view, low, maximum, inv_t):
    """(mass, entropy sum), in units, of the logits of a row whose key is >= low."""
    mass, zsum = tl.zeros([SCAN], tl.int64), tl.zeros([SCAN], tl.int64)
    for start in range(0, view.rows.vocab, SCAN):
        x = _load_scanned(view, start)
        w = tl.where(key_of(x) >= low, weights(x, maximum, inv_t), 0.0)
        z = tl.where(w > 0, (x - maximum) * inv_t, 0.0)
        mass += (w * UNIT).to(tl.int64)
        zsum += (w * z * UNIT).to(tl.int64)
    return sums(mass, zsum)


@triton.jit
def _edge_of_row(view, need, low, high, maximum, inv_t, numbers):
    """As `edge_of`, of all logits of a row, which is read at each step; 1 / T = 0 counts them."""
    last = place_above(high, low, numbers)
    first = last * 0
    while first < last:
        a, b, c = _quarters(first, last)
        of_a, of_b, of_c = tl.zeros([SCAN], tl.int64), tl.zeros([SCAN], tl.int64), tl.zeros([SCAN], tl.int64)
        for start in range(0, view.rows.vocab, SCAN):
            x = _load_scanned(view, start)
            above, mass = place_above(key_of(x), low, numbers), units(x, maximum, inv_t)
            of_a += tl.where(above >= a, mass, 0)
            of_b += tl.where(above >= b, mass, 0)
            of_c += tl.where(above >= c, mass, 0)
        first, last = _narrowed_to(first, last, a, b, c, (of_a, of_b, of_c), need)
    return key_above(first, low, numbers)


@triton.jit
def by_scanning(view, maximum, settings, numbers):
    """(threshold, mass, entropy sum) of one row by searches in the whole row: exact, slow, rarely needed."""
    inv_t, t, k, p, floor = settings.inv_t, settings.t, settings.k, settings.p, settings.floor
    top = key_of(maximum)
    threshold = key_of(min_p_threshold(maximum, t, floor))
    if k > 0:
        kth = _edge_of_row(view, k.to(tl.float64) * UNIT, lowest_key(), top, maximum, 0.0, numbers)
        threshold = tl.maximum(threshold, kth)
    threshold = tl.minimum(threshold, top)
    if p < 1:
        whole, _ = _scan(view, threshold, maximum, inv_t)
        need = whole.to(tl.float64) * p.to(tl.float64)
        threshold = _edge_of_row(view, need, threshold, top, maximum, inv_t, numbers)
    mass, zsum = _scan(view, threshold, maximum, inv_t)
    scale = 1.0 / UNIT
    return value_of(threshold), mass.to(tl.float32) * scale, zsum.to(tl.float32) * scale
