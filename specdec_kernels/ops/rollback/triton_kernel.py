"""rollback in Triton: count the pages of each tail, then take them; one launch before these to write zeros."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import cache
from ..._triton import launch as host
from ..._triton.cache import Views, item_of, locate, zero_rows
from ..._triton.codes import S_LAYOUT

ENTRIES = 64  # of a table that a program reads at once


@triton.jit
def _tail_of(blocks, lengths, num_accepted, b, max_tail, ENTRIES: tl.constexpr):
    """(new length, first entry of the tail, one past its last, acts, bad) of request b."""
    count, length = tl.load(num_accepted + b).to(tl.int64), tl.load(lengths + b).to(tl.int64)
    capacity = tl.cast(blocks.blocks, tl.int64) * blocks.page_size  # of a dense cache it is the constant 1
    runs = count >= 0
    bad = (count < -1) | (runs & ((length < 0) | (length > capacity) | (length + 1 + count > capacity)))
    new = tl.where(runs & (bad == 0), length + 1 + count, 0)
    first = new // blocks.page_size
    last = tl.minimum((new + max_tail + blocks.page_size - 1) // blocks.page_size, blocks.blocks)
    end = first
    is_open = runs & (bad == 0) & (end < last)
    while is_open:
        i = tl.arange(0, ENTRIES)
        wanted = end + i < last
        if blocks.entries is not None:
            page = tl.load(blocks.entries + b * blocks.row + end + i, mask=wanted, other=-1).to(tl.int64)
        else:
            page = tl.where(wanted, b, -1)
        owned = tl.min(tl.where(page < 0, i, ENTRIES), axis=0)
        bad = bad | (tl.max(((page >= blocks.num_pages) & (i < owned)).to(tl.int32), axis=0) > 0)
        end += owned
        is_open = (owned == ENTRIES) & (bad == 0) & (end < last)
    acts = runs & (bad == 0)
    return tl.where(acts, new, length), first, end, acts, bad


@triton.jit
def _zero_kernel(
    views, blocks, lengths, num_accepted, max_tail, ENTRIES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Zeros behind the new length, as far as there are pages. Grid: batch * tensors * splits."""
    views = Views(*views)
    b, tensor, split = item_of(views)
    new, _, end, acts, _ = _tail_of(blocks, lengths, num_accepted, b, max_tail, ENTRIES)
    if acts:
        last = tl.minimum(new + max_tail, end * blocks.page_size)
        for first in range(new, last, ROWS):
            position = first + tl.arange(0, ROWS)
            page, slot, exists = locate(blocks, b, position, position < last)
            zero_rows(views, tensor, split, page, slot, exists, COLUMNS, UNIT, ELEMENT)


@triton.jit
def _count_kernel(blocks, lengths, num_accepted, max_tail, new_lengths, dropped, status, ENTRIES: tl.constexpr):
    """New length, status and number of dropped pages. Grid: batch."""
    b = tl.program_id(0).to(tl.int64)
    new, first, end, acts, bad = _tail_of(blocks, lengths, num_accepted, b, max_tail, ENTRIES)
    tl.store(new_lengths + b, new)
    tl.store(status + b, tl.where(bad, S_LAYOUT, 0))
    if dropped is not None:
        keeps = (new % blocks.page_size != 0).to(tl.int64)  # the page that the last token shares with the tail
        tl.store(dropped + b, tl.where(acts, tl.maximum(end - first - keeps, 0), 0).to(tl.int32))


@triton.jit
def _trim_kernel(
    blocks, new_lengths, dropped, batch, freed, width, num_freed, BATCH: tl.constexpr, ENTRIES: tl.constexpr
):
    """Moves dropped entries from the table to the list, request after request. Grid: max(batch, 1)."""
    b = tl.program_id(0).to(tl.int64)
    others = tl.arange(0, BATCH)
    counts = tl.load(dropped + others, mask=others < batch, other=0)
    total = tl.sum(counts, axis=0)
    at = tl.sum(tl.where(others < b, counts, 0), axis=0)
    count = tl.sum(tl.where(others == b, counts, 0), axis=0)
    if b == 0:
        tl.store(num_freed, total)
    if count > 0:
        first = (tl.load(new_lengths + b).to(tl.int64) + blocks.page_size - 1) // blocks.page_size
        entry = blocks.entries + b * blocks.row + first
        for i in range(0, count, ENTRIES):
            n = i + tl.arange(0, ENTRIES)
            page = tl.load(entry + n, mask=n < count)
            tl.store(freed + at + n, page, mask=n < count)
            tl.store(entry + n, tl.full([ENTRIES], -1, page.dtype), mask=n < count)
    for i in range(total + b * ENTRIES, width, tl.num_programs(0) * ENTRIES):
        n = i + tl.arange(0, ENTRIES)
        tl.store(freed + n, tl.full([ENTRIES], -1, tl.int64), mask=n < width)


def rollback_out(
    tensors: list[Tensor], table: Tensor, block_table: Tensor | None, page_size: int, num_pages: int,
    lengths: Tensor, num_accepted: Tensor, max_tail: int,
    out_lengths: Tensor, out_freed_pages: Tensor, out_num_freed: Tensor, out_status: Tensor,
) -> None:  # fmt: skip
    """Launcher."""
    batch = len(lengths)
    where = cache.blocks(block_table, page_size, num_pages)
    entries = min(host.power(-(-max_tail // page_size) + 1), ENTRIES)
    if tensors and max_tail:
        views, constants = cache.views(tensors, table, batch)
        host.launch(
            _zero_kernel, batch * views.tensors * views.splits, views, where, lengths, num_accepted, max_tail,
            ENTRIES=entries, ROWS=cache.ROWS, **constants,
        )  # fmt: skip
    dropped = None if block_table is None else torch.empty(batch, dtype=torch.int32, device=lengths.device)
    host.launch(
        _count_kernel, batch, where, lengths, num_accepted, max_tail, out_lengths, dropped, out_status,
        ENTRIES=entries, num_warps=1,
    )  # fmt: skip
    if block_table is None:
        out_num_freed.zero_()
        return
    host.launch(
        _trim_kernel, max(batch, 1), where, out_lengths, dropped, batch, out_freed_pages, len(out_freed_pages),
        out_num_freed, BATCH=host.power(batch), ENTRIES=entries, num_warps=1,
    )  # fmt: skip
