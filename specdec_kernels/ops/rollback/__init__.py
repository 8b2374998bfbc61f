"""Lengths after a step, and the pages that verification left empty."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._cache import CacheLayout
from ..._check import ID_DTYPES, Checker, fail
from ..._codes import Backend
from ..._op import Op, Shape
from . import reference


class RollbackResult(NamedTuple):
    """Result of `rollback`.

    Attributes:
        lengths: ``[batch]``, dtype of the lengths given: tokens in the cache now. It is also the position of the
            drawn token, the root of the next step.
        freed_pages: dtype of the block table, 1-D: ids of the pages dropped, request by request in table order, then
            -1; empty for a dense cache. A page that two tables drop is listed twice.
        num_freed: int32 ``[1]``: how many of them there are.
        status: int32 ``[batch]``: 32 for a request that was left alone because its numbers or its table are bad.
    """

    lengths: Tensor
    freed_pages: Tensor
    num_freed: Tensor
    status: Tensor


def _shapes(
    tensors: object, table: object, block_table: Tensor | None, page_size: int, num_pages: int,
    lengths: Tensor, num_accepted: Tensor, max_tail: int,
) -> tuple[Shape, ...]:  # fmt: skip
    freed: Shape = ((0,), torch.int32)
    if block_table is not None:
        blocks = (max_tail + page_size - 1) // page_size
        freed = ((lengths.shape[0] * min(block_table.shape[1], blocks),), block_table.dtype)
    return (lengths.shape, lengths.dtype), freed, ((1,), torch.int32), (lengths.shape, torch.int32)


op = Op(
    reference.rollback, _shapes,
    results=RollbackResult._fields, mutates=("tensors", "block_table"),
)  # fmt: skip


def rollback(
    layout: CacheLayout,
    lengths: Tensor,
    num_accepted: Tensor,
    *,
    max_tail: int | None = None,
    zero_tail: bool = False,
    out: RollbackResult | None = None,
    backend: Backend | None = None,
) -> RollbackResult:
    """Take back what a step wrote beyond its accepted tokens: new lengths, freed pages, trimmed tables.

    A step writes the root (the last committed token), then its drafts. What stays is the root and the accepted ones:

        ``new_lengths[b] = lengths[b] + 1 + num_accepted[b]``.

    The token drawn after them has no row yet; it is the root of the next step. Pages of request b that begin at or
    after its new length leave ``layout.block_table`` (set to -1) and are returned. Call `compact_cache` first if the
    step was a tree.

    Args:
        layout: where the rows lie; its block table is written.
        lengths: int32 or int64 ``[batch]``: tokens in the cache before this step's rows.
        num_accepted: int32 ``[batch]``; 0 is legal; -1: the request took no part in this step and is left alone.
        max_tail: how many slots after a new length may hold something, a host int: the widest tree, say. Pages beyond
            stay, and `freed_pages` is no longer than needed. None: the whole table.
        zero_tail: also overwrite these slots with zeros, in kept and in dropped pages: what attention masks out by
            multiplying must be finite.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        RollbackResult. A request is flagged (32) and left alone where its length is negative, the new one exceeds its
        table, num_accepted is below -1, or a page of its tail is not one of the pool.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import CacheLayout, rollback
        >>> pool, table = torch.zeros(9, 4, 8, 64), torch.tensor([[5, 2, 7, -1]])  # pages of 4 slots
        >>> layout = CacheLayout([pool], "nhd", table)
        >>> result = rollback(layout, torch.tensor([3]), torch.zeros(1, dtype=torch.int32), max_tail=8)
        >>> result.lengths, result.freed_pages, result.num_freed, table
        (tensor([4]), tensor([2, 7]), tensor([2], dtype=torch.int32), tensor([[ 5, -1, -1, -1]]))
    """
    if not isinstance(layout, CacheLayout):
        fail("rollback", "layout", "a CacheLayout", type(layout).__name__)
    check = Checker("rollback", layout.device)
    check.vector("lengths", lengths, ID_DTYPES, layout.batch)
    check.vector("num_accepted", num_accepted, (torch.int32,), layout.batch)
    if max_tail is not None and (not isinstance(max_tail, int) or max_tail < 0):
        fail("rollback", "max_tail", "a host int >= 0 or None", max_tail)
    tail = layout.capacity if max_tail is None else min(max_tail, layout.capacity)
    results = op(
        layout.tensors if zero_tail else [], layout.table, layout.block_table, layout.page_size, layout.num_pages,
        lengths, num_accepted, tail,
        device=layout.device, backend=backend, out=out,
    )  # fmt: skip
    return RollbackResult(*results)
