"""edit_rows in Triton: one program a row. It marks the ids that change, counts them, then writes how they change.

What lists ids is gone through three times: to mark them in the row's bits; once their places are known, to write what
changes nothing there; and to write what does, bans last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.rows import Changes, bit_of, change_of, entry_or, fact, ones, size_of
from ..._triton.table import count_of
from ..._types import EditArguments

MARK, CLEAR, WRITE = (tl.constexpr(i) for i in range(3))
LIST, CHUNK = tl.constexpr(128), tl.constexpr(512)  # ids of a list, and words or places of a table, at once


class Asked(NamedTuple):
    """`Edits` of the requests; what is not given is a null pointer."""

    bias_ids: Any
    bias: Any
    repetition: Any
    frequency: Any
    presence: Any
    slots: Any
    stop_ids: Any
    min_tokens: Any
    bad_words: Any
    tail: Any
    active: Any
    biases: Any  # ids of a request, a `launch.size`, as the next ones
    stops: Any
    words: Any
    length: Any  # of a bad word
    tails: Any
    first_id: Any


class Drafts(NamedTuple):
    """The drafts before each row."""

    ids: Any  # [batch, width], flat [total], or with a root [batch, width + 1]
    parents: Any  # [batch, width + 1] or None
    cu: Any  # int32 [batch + 1] or None
    path: Any  # int64 [rows, width], scratch: the ids before each row
    batch: Any  # a `launch.size`, as the next ones
    total: Any
    width: Any
    behind: Any  # drafts before the first row of a request: all of them where it has one row


class Out(NamedTuple):
    """Where the results go."""

    changes: Any  # of the rows
    vocab: Any  # a `launch.size`


class Row(NamedTuple):
    """The row of a program, and the text behind which it stands."""

    out: Any
    asked: Any
    table: Any
    b: Any
    number: Any
    path: Any
    length: Any  # ids of the path
    slot: Any  # of the table, -1 if there is none
    repetition: Any
    frequency: Any
    presence: Any


@triton.jit
def _flat_place(asked, drafts, number):
    """(request, whether there is one, its first draft) of a row that flat chains count through the batch."""
    b = tl.full([], -1, tl.int32)
    for start in range(0, size_of(drafts.batch), CHUNK):
        c = start + tl.arange(0, CHUNK)
        on = c < size_of(drafts.batch)
        first = tl.load(drafts.cu + c, mask=on, other=-1).to(tl.int64)
        last = tl.load(drafts.cu + c + 1, mask=on, other=-1).to(tl.int64)
        total, length = size_of(drafts.total), last - first
        bad = (length < 0) | (last > total) | (length > size_of(drafts.width)) | ((c == 0) & (first != 0))
        end = first + c + tl.where(bad, 0, length)
        mine = on & (first >= 0) & (first <= total) & (first + c <= number) & (number <= end)
        mine = mine & (tl.load(asked.active + c, mask=on & (asked.active.to(tl.int64) != 0), other=1) != 0)
        b = tl.maximum(b, tl.max(tl.where(mine, c, -1), axis=0))
    is_there = b >= 0
    b = tl.maximum(b, 0)
    return b.to(tl.int64), is_there, tl.load(drafts.cu + b, mask=is_there, other=0).to(tl.int64)


@triton.jit
def _is_tree(drafts, b):
    """Whether the parents of a request are those of a tree."""
    nodes, bad = size_of(drafts.width) + 1, tl.full([], 0, tl.int32)
    at = drafts.parents + b * nodes
    for start in range(0, nodes, LIST):
        n = start + tl.arange(0, LIST)
        parent = tl.load(at + n, mask=n < nodes, other=-1).to(tl.int64)
        inner = (parent > 0) & (parent < n)
        fits = (parent == 0) | (inner & (tl.load(at + parent, mask=inner, other=-1) != -1))
        wrong = (parent != -1) & ((n == 0) | (fits == 0))
        bad = tl.maximum(bad, tl.max(wrong.to(tl.int32), axis=0))
    return bad == 0


@triton.jit
def _put_chain(ids, path, i):
    """Write the ids before a row of a chain, without gaps; how many there are."""
    length = tl.full([], 0, tl.int32)
    for start in range(0, i, LIST):
        j = start + tl.arange(0, LIST)
        token = tl.load(ids + j, mask=j < i, other=-1).to(tl.int64)
        on = (token != -1).to(tl.int32)
        tl.store(path + length + tl.cumsum(on, axis=0) - 1, token, mask=on != 0)
        length += tl.sum(on, axis=0)
    return length


@triton.jit
def _put_branch(ids, parents, path, i):
    """Write the ids on the way from the root to a node, the root's left out; how many there are."""
    length, node = tl.full([], 0, tl.int32), i.to(tl.int64)
    while node > 0:
        length += tl.where(tl.load(ids + node) != -1, 1, 0)
        node = tl.load(parents + node).to(tl.int64)
    place, node = length, i.to(tl.int64)
    while node > 0:
        token = tl.load(ids + node).to(tl.int64)
        place -= tl.where(token != -1, 1, 0)
        tl.store(path + place, token, mask=token != -1)
        node = tl.load(parents + node).to(tl.int64)
    return length


@triton.jit
def _row_of(out, asked, drafts, table, number):
    """(the row of a program, whether there is one); its path is written."""
    width = size_of(drafts.width)
    path = drafts.path + number * width
    if drafts.cu is not None:
        b, is_there, first = _flat_place(asked, drafts, number)
        i, ids = (number - first - b).to(tl.int32), drafts.ids + first
    else:
        each = width + 1 - size_of(drafts.behind)
        b, i = number // each, (number % each).to(tl.int32) + size_of(drafts.behind)
        is_there = entry_or(asked.active, b, 1) != 0
        ids = drafts.ids + b * width
    if drafts.parents is not None:
        ids, parents = drafts.ids + b * (width + 1), drafts.parents + b * (width + 1)
        is_there = is_there & ((i == 0) | ((tl.load(parents + i) != -1) & _is_tree(drafts, b)))
        length = _put_branch(ids, parents, path, tl.where(is_there, i, 0))
    else:
        length = _put_chain(ids, path, tl.where(is_there, i, 0))
    slot = entry_or(asked.slots, b, b.to(tl.int32)).to(tl.int64)
    slot = tl.where((slot >= 0) & (slot < size_of(table.slots)), slot, -1)
    repetition, frequency = entry_or(asked.repetition, b, 1.0), entry_or(asked.frequency, b, 0.0)
    presence = entry_or(asked.presence, b, 0.0)
    return Row(out, asked, table, b, number, path, length, slot, repetition, frequency, presence), is_there


@triton.jit
def _places(row, ids, on):
    """(columns of ids that are on, whether this rank has them)."""
    column = ids - size_of(row.asked.first_id)
    return column, on & (ids >= 0) & (column >= 0) & (column < size_of(row.out.vocab))


@triton.jit
def _place(row, column, on):
    """The number of the edit of an id that is marked."""
    return change_of(row.out.changes, row.number, size_of(row.out.vocab), column, on)[1]


@triton.jit
def _list(row, ids, on, PHASE: tl.constexpr):
    """Mark ids, or write that nothing changes."""
    column, on = _places(row, ids, on)
    if PHASE == MARK:
        words = row.out.changes.bits + row.number * ((size_of(row.out.vocab) + 63) // 64)
        tl.atomic_or(words + column // 64, bit_of(column).to(tl.int64, bitcast=True), mask=on, sem="relaxed")
    else:
        at, plane = row.out.changes.numbers + _place(row, column, on), size_of(row.out.changes.plane)
        zero = tl.zeros_like(column).to(tl.float32)
        tl.store(at, zero, mask=on)
        tl.store(at + plane, zero + 1.0, mask=on)
        tl.store(at + 2 * plane, zero, mask=on)
        tl.store(at + 3 * plane, column.to(tl.float32), mask=on)


@triton.jit
def _bias(row, PHASE: tl.constexpr):
    count = size_of(row.asked.biases)
    for start in range(0, count, LIST):
        j = start + tl.arange(0, LIST)
        ids = tl.load(row.asked.bias_ids + row.b * count + j, mask=j < count, other=-1)
        if PHASE == WRITE:
            column, on = _places(row, ids, j < count)
            bias = tl.load(row.asked.bias + row.b * count + j, mask=on, other=0.0)
            tl.store(row.out.changes.numbers + _place(row, column, on), bias, mask=on)
        else:
            _list(row, ids, j < count, PHASE)


@triton.jit
def _penalised(row, ids, generated, in_prompt, on, PHASE: tl.constexpr):
    """Ids of the text; those that no penalty reaches are left out."""
    repeats = (in_prompt | (generated > 0)) & fact(row.repetition != 1.0)
    counts_more = (generated > 0) & fact((row.frequency != 0.0) | (row.presence != 0.0))
    on = on & (repeats | counts_more)
    if PHASE == WRITE:
        column, on = _places(row, ids, on)
        at, plane = row.out.changes.numbers + _place(row, column, on), size_of(row.out.changes.plane)
        minus = row.frequency * generated.to(tl.float32) + row.presence
        tl.store(at + plane, tl.where(repeats, row.repetition, 1.0), mask=on)
        tl.store(at + 2 * plane, tl.where(counts_more, minus, 0.0), mask=on)
    else:
        _list(row, ids, on, PHASE)


@triton.jit
def _penalise_table(row, PHASE: tl.constexpr):
    """The ids that the table holds."""
    capacity = size_of(row.table.capacity)
    for start in range(0, tl.where(row.slot >= 0, capacity, 0), CHUNK):
        place = start + tl.arange(0, CHUNK)
        at = row.slot * capacity + place
        ids = tl.load(row.table.ids + at, mask=place < capacity, other=-1)
        count = tl.load(row.table.counts + at, mask=ids >= 0, other=0)
        generated = tl.maximum(count >> 1, 0)
        for j in range(0, row.length):
            generated += (ids == tl.load(row.path + j)).to(tl.int32)
        _penalised(row, ids, generated, (count & 1) == 1, ids >= 0, PHASE)


@triton.jit
def _penalise_path(row, PHASE: tl.constexpr):
    """The drafted ids that it does not, each where it first stands."""
    for start in range(0, row.length, LIST):
        j = start + tl.arange(0, LIST)
        ids = tl.load(row.path + j, mask=j < row.length, other=-1)
        on, generated = ids >= 0, tl.zeros_like(j)
        for k in range(0, row.length):
            same = ids == tl.load(row.path + k)
            generated += same.to(tl.int32)
            on = on & ((same & (k < j)) == 0)
        known = count_of(row.table, row.slot, ids.to(tl.int32), on & (row.slot >= 0))[1]
        _penalised(row, ids, generated, j < 0, on & (known == 0), PHASE)


@triton.jit
def _ban(row, ids, on, PHASE: tl.constexpr):
    if PHASE == WRITE:
        column, on = _places(row, ids, on)
        at = row.out.changes.numbers + _place(row, column, on)
        tl.store(at, tl.full(ids.shape, float("-inf"), tl.float32), mask=on)
    else:
        _list(row, ids, on, PHASE)


@triton.jit
def _ban_stops(row, PHASE: tl.constexpr):
    """Stop ids that come too early."""
    count = size_of(row.asked.stops)
    is_early = row.length < entry_or(row.asked.min_tokens, row.b, 0)
    for start in range(0, tl.where(is_early, count, 0), LIST):
        j = start + tl.arange(0, LIST)
        ids = tl.load(row.asked.stop_ids + row.b * count + j, mask=j < count, other=-1)
        _ban(row, ids, j < count, PHASE)


@triton.jit
def _ban_words(row, PHASE: tl.constexpr):
    """Last ids of bad words whose rest stands at the end of the text."""
    count, length, tails = size_of(row.asked.words), size_of(row.asked.length), size_of(row.asked.tails)
    for start in range(0, count, LIST):
        j = start + tl.arange(0, LIST)
        at, meets = row.asked.bad_words + (row.b * count + j) * length, j < count
        for k in range(0, length - 1):
            place = row.length - (length - 1) + k  # on the path; before it, in the tail
            drafted = tl.load(row.path + place, mask=place >= 0, other=0)
            told = tl.load(row.asked.tail + row.b * tails + tails + place, mask=place < 0, other=0)
            wanted = tl.load(at + k, mask=j < count, other=-1)
            meets = meets & ((wanted == -1) | (wanted == tl.where(place >= 0, drafted, told.to(tl.int64))))
        _ban(row, tl.load(at + length - 1, mask=j < count, other=-1), meets, PHASE)


@triton.jit
def _visit(row, PHASE: tl.constexpr):
    """Mark what edits list, write that nothing changes, or what does."""
    _bias(row, PHASE)
    tl.debug_barrier()
    if (row.repetition != 1.0) | (row.frequency != 0.0) | (row.presence != 0.0):
        _penalise_table(row, PHASE)
        _penalise_path(row, PHASE)
    tl.debug_barrier()
    _ban_stops(row, PHASE)
    _ban_words(row, PHASE)
    tl.debug_barrier()


@triton.jit
def _empty(changes, number, blocks):
    """No id of the row is marked."""
    for start in range(0, blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        tl.store(changes.bits + number * blocks + block, tl.zeros_like(block).to(tl.int64), mask=block < blocks)
    tl.debug_barrier()


@triton.jit
def _count(changes, number, blocks):
    """How many ids are marked before each block."""
    before = tl.full([], 0, tl.int32)
    for start in range(0, blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        there = block < blocks
        found = ones(tl.load(changes.bits + number * blocks + block, mask=there, other=0).to(tl.uint64, bitcast=True))
        tl.store(changes.start + number * (blocks + 1) + block, before + tl.cumsum(found, axis=0) - found, mask=there)
        before += tl.sum(found, axis=0)
    tl.store(changes.start + number * (blocks + 1) + blocks, before)
    tl.debug_barrier()


@host.entry
def _edit_kernel(out, asked, drafts, table):
    """Bits, places and values of a row. Grid: rows."""
    number = tl.program_id(0).to(tl.int64)
    blocks = (size_of(out.vocab) + 63) // 64
    row, is_there = _row_of(out, asked, drafts, table, number)
    _empty(out.changes, number, blocks)
    if is_there:
        _visit(row, MARK)
    _count(out.changes, number, blocks)
    if is_there:
        _visit(row, CLEAR)
        _visit(row, WRITE)


def edit_rows_out(given: EditArguments, edit_bits: Tensor, edit_start: Tensor, edit_values: Tensor) -> None:
    """Write the results of `reference.edit_rows`."""
    draft_ids, cu, edits, width = given.draft_ids, given.cu_draft, given.edits, given.max_draft
    device, int32, float32, size = edit_bits.device, torch.int32, torch.float32, host.size
    _, count, room = edit_values.shape

    def null(part: Tensor | None, dtype: torch.dtype) -> Tensor:
        return scratch.given_or_null(part, dtype, device)

    def ids_of(part: Tensor | None) -> int:
        return 0 if part is None else part.shape[1]

    length = 0 if edits.bad_words is None else edits.bad_words.shape[2]
    asked = Asked(
        null(edits.bias_ids, int32), null(edits.bias, float32), null(edits.repetition, float32),
        null(edits.frequency, float32), null(edits.presence, float32), null(edits.slots, int32),
        null(edits.stop_ids, int32), null(edits.min_tokens, int32), null(edits.bad_words, int32),
        null(edits.tail, int32), null(given.active, torch.bool), size(ids_of(edits.bias_ids)),
        size(ids_of(edits.stop_ids)), size(ids_of(edits.bad_words)), size(length), size(ids_of(edits.tail)),
        size(given.first_id),
    )  # fmt: skip
    drafts = Drafts(
        null(draft_ids, torch.int64), given.parents, cu, torch.empty(count * width, dtype=torch.int64, device=device),
        size(given.batch), size(0 if draft_ids is None else draft_ids.shape[0]), size(width),
        size(width if given.only_last else 0),
    )  # fmt: skip
    changes = Changes(edit_bits, edit_start, edit_values, size(room), size(count * room))
    out = Out(changes, size(given.vocab))
    table = scratch.table_of(*edits.counts, device)
    host.launch(_edit_kernel, count, out, asked, drafts, table, num_warps=4, registers=128)
