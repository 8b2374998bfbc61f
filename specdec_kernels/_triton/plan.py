"""Which rows a call reads. What streams and settles rows asks here, and knows no rule.

A row of a call has a number: b * (NT + ND) + slot, slots below NT the target rows of request b, the others its draft
rows. Rows of chains are found from their number; those of trees stand in a table, which the walk writes.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chains import extent_of
from .rows import entry_or, size_of

# What a table knows of a row, int64: its first element, -1 if it is not read; its number (`number_of`), that of a draft
# row as -1 - number; the position that its draw is named by.
P_OFFSET, P_NUMBER, P_POSITION, P_FIELDS = (tl.constexpr(i) for i in range(4))
# Of float32: 1 / T is 0 where T is infinite; the least number instead keeps -inf * (1 / T) what it is.
LEAST, MOST = tl.constexpr(1.401298464324817e-45), tl.constexpr(3.4028234663852886e38)


class Row(NamedTuple):
    """A row of a call, by the fields of a table."""

    offset: Any
    number: Any
    position: Any
    drafted: Any  # id that may follow, -1 if there is none; of chains only
    inv_t: Any


class Strides(NamedTuple):
    """Of rows, `launch.size`."""

    request: Any
    row: Any


class Chains(NamedTuple):
    """Chains of k drafted ids: k + more_target target rows and k + more_draft draft rows each."""

    chain: Any  # its ids as words of 32 bits: nothing that streams rows is compiled for their dtype
    words: Any  # of an id, a `launch.size` as the next
    vocab: Any
    target: Any  # Strides
    draft: Any
    nt: Any  # `launch.size`
    nd: Any
    more_target: Any
    more_draft: Any
    skips_greedy: Any  # whether a greedy target needs no draft rows; a greedy draft is read by nobody
    temperature: Any
    draft_temperature: Any
    position: Any  # int64 [batch]


class Plan(NamedTuple):
    """A table, or chains."""

    at: Any  # int64 [rows, P_FIELDS]
    inv_t: Any  # float32 [rows]
    chains: Any = None


@triton.jit
def put_row(plan, row, offset, number, position, inv_t, mask):
    """Plan rows (vectors) in a table."""
    at = plan.at + row * P_FIELDS
    tl.store(at + P_OFFSET, offset, mask=mask)
    tl.store(at + P_NUMBER, number, mask=mask)
    tl.store(at + P_POSITION, position, mask=mask)
    tl.store(plan.inv_t + row, tl.maximum(inv_t, LEAST), mask=mask)


@triton.jit
def _inverse(temperature, b):
    """(1 / T without the many instructions of `div_rn`, whether T is 0); finite, as sums of a greedy row are unread."""
    t = entry_or(temperature, b, 1.0)
    near = 1.0 / (t * 0.25) * 0.25  # a fast quotient is 0 where the divisor exceeds 2^126
    inv_t = tl.where((near > 0) & (near < float("inf")), tl.fma(near, tl.fma(-t, near, 1.0), near), near)
    # As tensors: Triton takes these two numbers for float64.
    return tl.minimum(tl.maximum(inv_t, tl.full([], LEAST, tl.float32)), tl.full([], MOST, tl.float32)), t == 0


@triton.jit
def _id_at(chains, at, on):
    """Drafted id number `at`, -1 where it is none."""
    words = size_of(chains.words)
    place = chains.chain.ids + at * words
    v, high = tl.load(place, mask=on, other=-1), tl.load(place + words - 1, mask=on, other=-1)
    is_id = (v >= 0) & (v < size_of(chains.vocab)) & ((words == 1) | (high == 0))
    return tl.where(is_id, v, -1)


@triton.jit
def _row_of_chains(chains, row):
    chain, nt = chains.chain, size_of(chains.nt)
    row = row.to(tl.int32)
    b, slot = row // (nt + size_of(chains.nd)), row % (nt + size_of(chains.nd))
    b, is_target = b.to(tl.int64), slot < nt
    i = tl.where(is_target, slot, slot - nt)
    first, length, _, lost = extent_of(chain, b)
    # Who is read stands behind an id: the first that is none ends the draft, what follows is none too.
    before = i - tl.where(is_target, chains.more_target, chains.more_draft)
    is_drafted = _id_at(chains, first + before, (before >= 0) & (before < length)) >= 0
    inv_t, greedy = _inverse(chains.temperature, b)
    draft_inv_t, draft_greedy = _inverse(chains.draft_temperature, b)
    unread = (is_target == 0) & (draft_greedy | (greedy & (chains.skips_greedy != 0)))
    read = ((before < 0) | is_drafted) & (unread == 0) & (lost == 0)
    request = size_of(tl.where(is_target, chains.target.request, chains.draft.request))
    stride = size_of(tl.where(is_target, chains.target.row, chains.draft.row))
    position = tl.zeros_like(b)
    if chains.position is not None:
        position = tl.load(chains.position + b)
    if chain.cu is None:
        offset, number = b * request + i.to(tl.int64) * stride, b * (size_of(chain.width) + 1) + i
    else:
        number = first + b + i
        offset = tl.where(is_target, number, first + i) * stride
    return Row(
        tl.where(read, offset, -1), tl.where(is_target, number, -1 - number), position + i,
        _id_at(chains, first + i, i < length), tl.where(is_target, inv_t, draft_inv_t),
    )  # fmt: skip


@triton.jit
def row_of(plan, row):
    """`Row` of a number."""
    if plan.at is not None:
        at = plan.at + row * P_FIELDS
        position, inv_t = tl.load(at + P_POSITION), tl.load(plan.inv_t + row)
        return Row(tl.load(at + P_OFFSET), tl.load(at + P_NUMBER), position, tl.full([], -1, tl.int32), inv_t)
    else:
        return _row_of_chains(plan.chains, row)
