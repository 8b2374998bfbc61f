"""Where the ids and rows of a request lie, dense or flat, and which target id a draft column stands for."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launch import entry
from .rows import is_active, size_of


class Chain(NamedTuple):
    """Drafted ids: [batch, width], or flat [total] with cu int32 [batch + 1]."""

    ids: Any
    cu: Any
    total: Any  # `launch.size`, as the next
    width: Any  # widest draft of the batch
    sampling: Any  # of the target, which says who is active


class Columns(NamedTuple):
    """Target id of each draft column, and the column of each target id (scratch, only partly written)."""

    token_map: Any  # int32 [draft_vocab] or None
    inverse: Any  # int32 [vocab] or None
    kept: Any = None  # or, of draft rows that hold candidates: target id of each column, laid out like their logits
    logsumexp: Any = None  # float32 [draft rows], with `kept`


class Drafted(NamedTuple):
    """What a request drafted."""

    ids: Any  # int64 [KP], padded with -1
    k: Any  # how many
    bad_id: Any  # whether they end at a bad id
    first: Any  # where they begin among all
    bad: Any  # whether the layout is
    lost: Any  # nothing is read of the request: its first row is unknown, or it is not active


@triton.jit
def extent_of(chain, b):
    """(where the drafts of request b begin, how many they are, whether the layout is bad, `Drafted.lost`)."""
    width, total = size_of(chain.width), size_of(chain.total)
    if chain.cu is None:
        first = b * width
        length = tl.full([], 0, tl.int64) + width
        bad = b < 0
        lost = b < 0
    else:
        first = tl.load(chain.cu + b).to(tl.int64)
        last = tl.load(chain.cu + b + 1).to(tl.int64)
        lost = (first < 0) | (first > total)
        bad = lost | (last < first) | (last > total) | (last - first > width) | ((b == 0) & (first != 0))
        length = tl.where(bad, 0, last - first)
    active = is_active(chain.sampling, b)
    return first, tl.where(active, length, 0), bad & active, lost | (active == 0)


@triton.jit
def chain_of(chain, b, vocab, KP: tl.constexpr):
    """`Drafted` of request b (int64)."""
    j = tl.arange(0, KP)
    width = size_of(chain.width)
    first, length, bad, lost = extent_of(chain, b)
    ids = tl.load(chain.ids + first + j, mask=(j < length) & (j < width), other=-1).to(tl.int64)
    ends = (ids < 0) | (ids >= vocab)
    k = tl.min(tl.where(ends, j, KP), axis=0)
    k = tl.minimum(k, width)
    bad_id = tl.max(((j == k) & ends & (ids != -1)).to(tl.int32), axis=0) > 0
    return Drafted(ids, k, bad_id, first, bad, lost)


@triton.jit
def row_offset(rows, chain, first, b, i, EXTRA: tl.constexpr):
    """Element offset of row i (EXTRA 1: target rows, of which each request has one more)."""
    if chain.cu is None:
        return b * size_of(rows.request) + i.to(tl.int64) * rows.row
    else:
        return (first + EXTRA * b + i) * rows.row


@triton.jit
def number_of(chain, first, b, i):
    """Number of target row i among all of them: that of its mask, its edits, and those of its draft row."""
    if chain.cu is None:
        return b * (size_of(chain.width) + 1) + i
    else:
        return first + b + i


@triton.jit
def column_of(columns, offset, v, mask, draft_vocab):
    """Column of target ids v in the draft row at `offset` (which broadcasts), -1 where there is none.

    What the inverse holds is believed only if it maps back.
    """
    if columns.kept is not None:
        c = tl.where(mask, -1, -1)
        for j in range(0, draft_vocab):
            c = tl.where(mask & (tl.load(columns.kept + offset + j) == v), j, c)
        return c
    elif columns.token_map is None:
        return tl.where(mask & (v < draft_vocab), v, -1)
    else:
        c = tl.load(columns.inverse + v, mask=mask, other=-1)
        inside = mask & (c >= 0) & (c < draft_vocab)
        back = tl.load(columns.token_map + c, mask=inside, other=-1)
        return tl.where(inside & (back == v), c, -1)


@entry
def invert_kernel(token_map, inverse, draft_vocab, vocab, BLOCK: tl.constexpr):
    """inverse[token_map[c]] = c. Grid: blocks of draft columns. Entries no column maps to stay unwritten."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(token_map + c, mask=c < draft_vocab, other=-1)
    tl.store(inverse + v, c, mask=(v >= 0) & (v < vocab))
