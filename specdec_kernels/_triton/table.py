"""Hash tables of the tokens so far: where the search for an id begins, and where it ends."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .rows import size_of


class Table(NamedTuple):
    """As `TokenCounts`; null pointers and no capacity where there are no tables."""

    ids: Any  # int32 [slots, capacity]
    counts: Any
    slots: Any  # how many there are, a `launch.size`, as the next two
    capacity: Any  # a power of two
    bits: Any  # its logarithm


@triton.jit
def first_place(table, ids):
    """Where the search for ids begins: the high bits of a product, as `_edits.place_of`."""
    product = ids.to(tl.uint32) * 2654435761
    return ((product >> 1) >> (31 - size_of(table.bits)).to(tl.uint32)).to(tl.int32)


@triton.jit
def count_of(table, slot, ids, mask):
    """(how often ids were counted, whether the table holds them), as it stands; 0 where mask is off."""
    capacity = size_of(table.capacity)
    count, known = tl.zeros_like(ids).to(tl.int32), mask & (ids < 0)
    place, steps = first_place(table, ids), 0
    searched = mask & (ids >= 0)
    going = tl.max(searched.to(tl.int32), axis=0)
    while (going > 0) & (steps < capacity):
        at = slot * capacity + place
        found = tl.load(table.ids + at, mask=searched, other=-1)
        hit = searched & (found == ids)
        count = tl.where(hit, tl.load(table.counts + at, mask=hit, other=0), count)
        known = known | hit
        searched = searched & (found != ids) & (found != -1)
        place = (place + 1) & (capacity - 1)
        going = tl.max(searched.to(tl.int32), axis=0)
        steps += 1
    return count, known
