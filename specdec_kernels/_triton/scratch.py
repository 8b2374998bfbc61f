"""Host side: scratch tensors of a launch, and views of the arguments as kernels take them."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from .._check import SAMPLING_DTYPES
from .._types import RngKey, Sampling
from . import launch as host
from .chains import Columns, invert_kernel
from .rows import Noise, Rows


@functools.cache
def _null(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A null pointer: what a kernel gets for a tensor that is not given."""
    return torch.empty(0, dtype=dtype, device=device)


def sampling_of(sampling: Sampling, device: torch.device) -> Sampling:
    """Sampling parameters as kernels take them."""
    given = zip(sampling, SAMPLING_DTYPES, strict=True)
    return Sampling(*(_null(dtype, device) if part is None else part for part, dtype in given))


def noise_of(rng: RngKey, lane: Tensor | None = None) -> Noise:
    """Names of the random numbers as kernels take them."""
    none = _null(torch.int64, rng.seed.device)
    return Noise(rng.seed, rng.position, none if rng.step is None else rng.step, none if lane is None else lane)


def rows_of(logits: Tensor, *, flat: bool = False, allowed: Tensor | None = None) -> Rows:
    """Rows [batch, row, vocab], or [row, vocab] counted through the batch (flat)."""
    batch_stride = 0 if flat else logits.stride(0)
    row_stride = logits.stride(0 if flat else 1)
    allowed_stride = 0 if allowed is None else allowed.stride(0)
    is_aligned = batch_stride % 16 == 0 and row_stride % 16 == 0 and logits.data_ptr() % 16 == 0
    aligned = 16 if is_aligned else None
    return Rows(logits, host.size(batch_stride), row_stride, logits.shape[-1], allowed, allowed_stride, aligned)


def columns(token_map: Tensor | None, vocab: int) -> Columns:
    """The map of draft columns and its inverse, which one small launch writes."""
    if token_map is None:
        return Columns(None, None)
    inverse = torch.empty(vocab, dtype=torch.int32, device=token_map.device)
    count = token_map.shape[0]
    host.launch(invert_kernel, triton.cdiv(count, 1024), token_map, inverse, count, vocab, BLOCK=1024)
    return Columns(token_map, inverse)
