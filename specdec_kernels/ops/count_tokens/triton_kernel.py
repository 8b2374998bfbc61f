"""count_tokens in Triton: one program a request; its tokens enter the table many at a time, by compare and swap."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.codes import S_LAYOUT
from ..._triton.rows import entry_or, size_of
from ..._triton.table import first_place

CHUNK = 256  # tokens at once
FREE, NEVER = tl.constexpr(-1), tl.constexpr(-2)  # in a table there is no id that is `NEVER`


@host.entry
def _count_kernel(table, tokens, slots, status, width, amount, CHUNK: tl.constexpr):
    """Add `amount` to the count of each token, or 1 as the prompt's bit. Grid: batch."""
    b = tl.program_id(0).to(tl.int64)
    slot, capacity = entry_or(slots, b, b.to(tl.int32)).to(tl.int64), size_of(table.capacity)
    is_there = (slot >= 0) & (slot < size_of(table.slots))
    lost = tl.where(is_there | (slot == -1), 0, 1)
    for start in range(0, tl.where(is_there, width, 0), CHUNK):
        lane = tl.arange(0, CHUNK)
        ids = tl.load(tokens + b * width + start + lane, mask=start + lane < width, other=-1)
        searched, ids, steps = (ids >= 0) & (ids <= 0x7FFFFFFF), ids.to(tl.int32), 0
        # Lanes without a token swap as well, each elsewhere: what they look for never stands there.
        place = tl.where(searched, first_place(table, ids), lane & (capacity - 1))
        going = tl.max(searched.to(tl.int32), axis=0)
        while (going > 0) & (steps < capacity):
            at = slot * capacity + place
            wanted, new = tl.where(searched, FREE, NEVER), tl.where(searched, ids, NEVER)
            found = tl.atomic_cas(table.ids + at, wanted, new, sem="relaxed")
            hit = searched & ((found == FREE) | (found == ids))
            if amount == 1:
                tl.atomic_or(table.counts + at, tl.where(hit, 1, 0), mask=hit, sem="relaxed")
            else:
                tl.atomic_add(table.counts + at, tl.where(hit, amount, 0), mask=hit, sem="relaxed")
            searched = searched & (hit == 0)
            place = (place + 1) & (capacity - 1)
            going = tl.max(searched.to(tl.int32), axis=0)
            steps += 1
        lost |= going
    tl.store(status + b, tl.where(lost > 0, S_LAYOUT, 0))


def count_tokens_out(
    counted_ids: Tensor, counts: Tensor, token_ids: Tensor, slots: Tensor | None, amount: int, status: Tensor
) -> None:  # fmt: skip
    """Write the results of `reference.count_tokens`."""
    batch, width = token_ids.shape
    table = scratch.table_of(counted_ids, counts, status.device)
    slots = scratch.given_or_null(slots, torch.int32, status.device)
    host.launch(_count_kernel, batch, table, token_ids, slots, status, width, amount, CHUNK=CHUNK, num_warps=4)
