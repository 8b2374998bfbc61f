"""Host side: scratch tensors of a launch, and views of the arguments as kernels take them."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from .._check import SAMPLING_DTYPES
from .._edits import RowEdits
from .._types import Kept, RngKey, Sampling, Typical
from . import launch as host
from .chains import Columns, invert_kernel
from .rows import Changes, Noise, Rows
from .table import Table


@functools.cache
def _null(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A null pointer: what a kernel gets for a tensor that is not given."""
    return torch.empty(0, dtype=dtype, device=device)


def given_or_null(part: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An optional tensor as kernels take it."""
    return _null(dtype, device) if part is None else part


def typical_of(typical: Typical, is_read: bool, device: torch.device) -> Typical:
    """Thresholds as kernels take them."""
    if not is_read:
        return typical
    parts = (given_or_null(part, torch.float32, device) for part in (typical.typical_epsilons, typical.typical_deltas))
    return Typical(typical.typical_epsilon, typical.typical_delta, *parts)


def table_of(ids: Tensor | None, counts: Tensor | None, device: torch.device) -> Table:
    """Counts of tokens as kernels take them."""
    slots, capacity = (0, 0) if ids is None else ids.shape
    ids, counts = (given_or_null(part, torch.int32, device) for part in (ids, counts))
    return Table(ids, counts, host.size(slots), host.size(capacity), host.size(max(capacity, 1).bit_length() - 1))


def sampling_of(sampling: Sampling, device: torch.device) -> Sampling:
    """Sampling parameters as kernels take them."""
    given = zip(sampling, SAMPLING_DTYPES, strict=True)
    return Sampling(*(given_or_null(part, dtype, device) for part, dtype in given))


def noise_of(rng: RngKey, lane: Tensor | None = None) -> Noise:
    """Names of the random numbers as kernels take them."""
    step, lane = (given_or_null(part, torch.int64, rng.seed.device) for part in (rng.step, lane))
    return Noise(rng.seed, rng.position, step, lane)


def changes_of(edits: RowEdits | None) -> Changes | None:
    """Edits as kernels take them."""
    if edits is None or edits.edit_values is None:
        return None
    _, count, room = edits.edit_values.shape
    return Changes(*edits, host.size(room), host.size(count * room))


def rows_of(
    logits: Tensor, *, flat: bool = False, allowed: Tensor | None = None, edits: RowEdits | None = None
) -> Rows:
    """Rows [batch, row, vocab], or [row, vocab] counted through the batch (flat)."""
    batch_stride = 0 if flat else logits.stride(0)
    row_stride = logits.stride(0 if flat else 1)
    allowed_stride = 0 if allowed is None else allowed.stride(0)
    is_aligned = batch_stride % 16 == 0 and row_stride % 16 == 0 and logits.data_ptr() % 16 == 0
    return Rows(
        logits.shape[-1], logits, host.size(batch_stride), row_stride, allowed, host.size(allowed_stride),
        changes_of(edits), 16 if is_aligned else None,
    )  # fmt: skip


def options_of(*rows: Rows) -> dict[str, int]:
    """Launch options of a kernel that looks up ids of these rows."""
    return host.MANY_REGISTERS if any(part.changes is not None for part in rows) else {}


def columns(token_map: Tensor | None, vocab: int, kept: Kept | None = None) -> Columns:
    """The map of draft columns and its inverse, which one small launch writes; or the candidates of each row."""
    if kept is not None and kept.kept_ids is not None:
        return Columns(None, None, kept.kept_ids, kept.kept_logsumexp)
    if token_map is None:
        return Columns(None, None)
    inverse = torch.empty(vocab, dtype=torch.int32, device=token_map.device)
    count = token_map.shape[0]
    host.launch(invert_kernel, triton.cdiv(count, 1024), token_map, inverse, count, vocab, BLOCK=1024)
    return Columns(token_map, inverse)
