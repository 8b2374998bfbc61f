"""rollback, spelled plainly: the length after a step, and the pages that no longer hold a token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._cache import locate
from ..._codes import Status


def rollback(
    tensors: list[Tensor],
    table: Tensor,
    block_table: Tensor | None,
    page_size: int,
    num_pages: int,
    lengths: Tensor,
    num_accepted: Tensor,
    max_tail: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.rollback`; without `tensors` the tail is not zeroed."""
    device = lengths.device
    entries = torch.arange(num_pages, device=device)[:, None] if block_table is None else block_table.long()
    batch, pages = entries.shape
    length, count = lengths.long(), num_accepted.long()
    runs = count >= 0
    new = torch.where(runs, length + 1 + count, length)
    bad = (count < -1) | (runs & ((length < 0) | (new < 0) | (new > pages * page_size)))
    first = torch.where(bad, 0, new)[:, None]
    last = first + max_tail

    start = torch.arange(pages, device=device) * page_size
    in_tail = (start + page_size > first) & (start < last)
    owned = in_tail & (~in_tail | (entries >= 0)).int().cumprod(1).bool()  # the first -1 ends the table
    bad = bad | (owned & (entries >= num_pages) & runs[:, None]).any(1)
    acts = (runs & ~bad)[:, None]
    dropped = acts & owned & (start >= first)

    position = torch.arange(pages * page_size, device=device).expand(batch, -1)
    place = locate(block_table, page_size, num_pages, position)
    zeroed = (acts & owned).repeat_interleave(page_size, 1) & (position >= first) & (position < last)
    for rows in tensors:
        rows[place.page[zeroed], place.slot[zeroed]] = 0
    new_lengths = torch.where(bad, length, new).to(lengths.dtype)
    status = torch.where(bad, Status.BAD_LAYOUT, 0).int()
    if block_table is None:
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return new_lengths, empty, torch.zeros(1, dtype=torch.int32, device=device), status

    width = batch * min(pages, -(-max_tail // page_size))
    rank = torch.where(dropped.flatten(), dropped.flatten().cumsum(0) - 1, width)
    freed = block_table.new_full((width + 1,), -1).scatter(0, rank, block_table.flatten())[:width]
    block_table.masked_fill_(dropped, -1)
    return new_lengths, freed, dropped.sum().int()[None], status
