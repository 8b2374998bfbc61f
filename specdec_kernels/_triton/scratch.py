"""Host side: scratch tensors of a launch, and views of the arguments as kernels take them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import launch as host
from .chains import Columns, invert_kernel
from .rows import Rows


def rows_of(logits: Tensor, *, flat: bool = False, allowed: Tensor | None = None) -> Rows:
    """Rows [batch, row, vocab], or [row, vocab] counted through the batch (flat)."""
    batch_stride = 0 if flat else logits.stride(0)
    row_stride = logits.stride(0 if flat else 1)
    allowed_stride = 0 if allowed is None else allowed.stride(0)
    return Rows(logits, batch_stride, row_stride, logits.shape[-1], allowed, allowed_stride)


def columns(token_map: Tensor | None, vocab: int) -> Columns:
    """The map of draft columns and its inverse, which one small launch writes."""
    if token_map is None:
        return Columns(None, None)
    inverse = torch.empty(vocab, dtype=torch.int32, device=token_map.device)
    count = token_map.shape[0]
    host.launch(invert_kernel, triton.cdiv(count, 1024), token_map, inverse, count, vocab, BLOCK=1024)
    return Columns(token_map, inverse)
