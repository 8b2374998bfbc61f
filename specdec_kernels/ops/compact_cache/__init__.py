"""Move the cache rows of the accepted path together, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._cache import CacheLayout
from ..._check import ID_DTYPES, Checker, fail
from ..._codes import Backend
from ..._op import Op, Shape
from . import reference


def _shapes(*args: Any) -> tuple[Shape, ...]:
    return ((args[6].shape, torch.int32),)


op = Op(reference.compact_cache, _shapes, results=("status",), mutates=("tensors",))


def compact_cache(
    layout: CacheLayout,
    path: Tensor,
    num_accepted: Tensor,
    lengths: Tensor,
    *,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Move the rows of the accepted path behind the root, for all layers, keys and values, in place and in one launch.

    A step writes one row for each node of its tree: node n of request b to slot ``lengths[b] + n``, the root (the last
    committed token) being node 0. With n_1, n_2, ... the accepted path, for d = 1 .. num_accepted[b]

        ``cache[b, lengths[b] + d] = cache[b, lengths[b] + n_d]``.

    The rows below ``lengths[b] + num_accepted[b] + 1`` are then those of the committed tokens; that number is the
    next length (`rollback` computes it and gives pages back). A chain needs no compaction: its rows are in place.

    Why this is safe in place: parents come before children, so ``n_1 < n_2 < ...`` and ``n_d >= d``. A row moves down
    or stays, and no row is written before it was read if the rows are taken in this order: what is written, slot d, is
    below every later source. The kernels take whole rows, or whole columns of rows, in this order; where several
    threads share a column, a group of rows is read by all before any of it is written. Rows already in place
    (``n_d = d``) are neither read nor written. Slots up to ``lengths[b]`` are never written, so requests may share the
    pages of a common prefix.

    Args:
        layout: where the rows lie.
        path: int32 or int64 ``[batch, n]``: accepted nodes without the root, as `verify_tree` returns them; entries
            from num_accepted on are not read.
        num_accepted: int32 ``[batch]``; -1: the request took no part in this step.
        lengths: int32 or int64 ``[batch]``: tokens in the cache before this step's rows.
        out: preallocated status.
        backend: see `verify_chain`.

    Returns:
        status, int32 ``[batch]``: 32 where num_accepted is outside ``[-1, n]``, the path does not rise, a length is
        negative or a row that must be read or written has no page in the table; nothing of that request moves.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import CacheLayout, compact_cache
        >>> keys = torch.tensor([7, 0, 1, 2, 3]).view(1, 1, 5, 1)  # a committed token, then nodes 0 to 3
        >>> path, one = torch.tensor([[2, 3, -1]]), torch.ones(1, dtype=torch.int32)
        >>> compact_cache(CacheLayout([keys], "bhld"), path, 2 * one, one), keys.flatten()
        (tensor([0], dtype=torch.int32), tensor([7, 0, 2, 3, 3]))
    """
    if not isinstance(layout, CacheLayout):
        fail("compact_cache", "layout", "a CacheLayout", type(layout).__name__)
    check = Checker("compact_cache", layout.device)
    path = check.dense("path", path, ID_DTYPES, (layout.batch, "n"))
    check.vector("num_accepted", num_accepted, (torch.int32,), layout.batch)
    check.vector("lengths", lengths, ID_DTYPES, layout.batch)
    status: Tensor = op(
        layout.tensors, layout.table, layout.block_table, layout.page_size, layout.num_pages,
        path, num_accepted, lengths,
        device=layout.device, backend=backend, out=out,
    )  # fmt: skip
    return status
