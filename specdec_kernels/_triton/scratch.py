"""Host side: scratch tensors of a launch, and views of the arguments as kernels take them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import launch as host
from .chains import Columns, invert_kernel
from .filters import Lists
from .rows import Rows
from .stats import F_FIELDS, I_FIELDS, Q_FIELDS, R_FIELDS, Partials


def rows_of(logits: Tensor, *, flat: bool = False, allowed: Tensor | None = None) -> Rows:
    """Rows [batch, row, vocab], or [row, vocab] counted through the batch (flat)."""
    batch_stride = 0 if flat else logits.stride(0)
    row_stride = logits.stride(0 if flat else 1)
    allowed_stride = 0 if allowed is None else allowed.stride(0)
    return Rows(logits, batch_stride, row_stride, logits.shape[-1], allowed, allowed_stride)


def partials(tickets: Tensor, rows: int, tiles: int) -> Partials:
    """Partial results and records of a launch."""
    f = torch.empty(F_FIELDS.value * rows * tiles, dtype=torch.float32, device=tickets.device)
    i = torch.empty(I_FIELDS.value * rows * tiles, dtype=torch.int32, device=tickets.device)
    record_f = torch.empty(rows * R_FIELDS.value, dtype=torch.float32, device=tickets.device)
    record_i = torch.empty(rows * Q_FIELDS.value, dtype=torch.int32, device=tickets.device)
    return Partials(tickets, f, i, record_f, record_i, rows, tiles)


def lists(
    logits: Tensor, rows: int, tiles: int, filters: tuple[Tensor | None, ...], *, races: bool = False, ids: bool = False
) -> Lists | None:
    """Scratch of the filters; None where no filter is given.

    `races`: rows are raced, not only measured; `ids`: the listed ids are wanted without that.
    """
    if all(value is None for value in filters):
        return None
    listed, sampled, gathered = rows * tiles * host.LISTED, rows * tiles * (host.TILE // 32), rows * host.GATHERED
    return Lists(
        logits.new_empty(listed), logits.new_empty(listed, dtype=torch.int16) if races or ids else None,
        logits.new_empty(sampled),
        logits.new_empty(rows * 2, dtype=torch.int32), logits.new_empty(rows * 8, dtype=torch.int64),
        logits.new_empty(gathered),
        logits.new_empty(gathered, dtype=torch.int32) if races else None,
    )  # fmt: skip


def columns(token_map: Tensor | None, vocab: int) -> Columns:
    """The map of draft columns and its inverse, which one small launch writes."""
    if token_map is None:
        return Columns(None, None)
    inverse = torch.empty(vocab, dtype=torch.int32, device=token_map.device)
    count = token_map.shape[0]
    host.launch(invert_kernel, triton.cdiv(count, 1024), token_map, inverse, count, vocab, BLOCK=1024)
    return Columns(token_map, inverse)
