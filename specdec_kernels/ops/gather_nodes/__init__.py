"""Gather what a model computed for the nodes of the accepted path."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._check import ID_DTYPES, Checker, fail
from ..._codes import Backend
from ..._op import Op, Shape
from . import reference


class GatherResult(NamedTuple):
    """Result of `gather_nodes`.

    Attributes:
        values: ``[batch, max_depth + 1, ...]``, dtype of the values given: the root's row, those of the path, zeros.
        status: int32 ``[batch]``: 32 where the path names a node that does not exist; it ends there.
    """

    values: Tensor
    status: Tensor


def _shapes(values: Tensor, path: Tensor) -> tuple[Shape, ...]:
    batch, columns = path.shape
    return ((batch, columns, values.shape[2]), values.dtype), ((batch,), torch.int32)


op = Op(reference.gather_nodes, _shapes, results=GatherResult._fields)


def gather_nodes(
    values: Tensor, path: Tensor, *, out: GatherResult | None = None, backend: Backend | None = None
) -> GatherResult:
    """The rows of the root and of the accepted path: hidden states or features that the next draft starts from.

    With n_1, n_2, ... the path of request b: ``out[b, 0] = values[b, 0]``, ``out[b, d] = values[b, n_d]``, and zeros
    after the path's end. Row i belongs to the node whose successor is ``token_ids[b, i]`` of `verify_tree`, which is
    how EAGLE and Medusa pair features with tokens. For a chain, ``path[b, i] = i + 1`` below num_accepted.

    Args:
        values: ``[batch, nodes, ...]``, any dtype; dense but for the first two axes.
        path: int32 or int64 ``[batch, max_depth + 1]``: nodes without the root, then -1, as `verify_tree` returns it;
            the last column, always -1 there, is not read.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        GatherResult.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import gather_nodes
        >>> features = torch.tensor([[10.0, 11.0, 12.0, 13.0]])[..., None]  # [batch, nodes, dim]
        >>> gather_nodes(features, torch.tensor([[2, 3, -1, -1]])).values[..., 0]
        tensor([[10., 12., 13.,  0.]])
    """
    check = Checker.of("gather_nodes", "values", values, "[batch, nodes, ...]")
    if values.dim() < 2 or 0 in values.shape[1:]:
        fail("gather_nodes", "values", "[batch, nodes, ...] with a root and no empty rows", list(values.shape))
    columns = check.dense("path", path, ID_DTYPES, (values.shape[0], "max_depth + 1")).shape[1]
    if columns == 0:
        fail("gather_nodes", "path", "[batch, max_depth + 1]", list(path.shape))
    is_plain = values.dim() == 3 and values.stride(2) == 1
    if not is_plain and not values[:1, :1].is_contiguous():
        fail("gather_nodes", "values", "dense but for its first two axes", f"strides {list(values.stride())}")
    shape = (values.shape[0], columns, *values.shape[2:])
    results = None
    if out is not None:
        if not isinstance(out, GatherResult):
            fail("gather_nodes", "out", "a GatherResult", type(out).__name__)
        fits = isinstance(out.values, Tensor) and (out.values.shape, out.values.dtype) == (shape, values.dtype)
        if not fits or not out.values.is_contiguous():
            got = f"{out.values.dtype} {list(out.values.shape)}" if isinstance(out.values, Tensor) else "no tensor"
            fail("gather_nodes", "out.values", f"contiguous {values.dtype} {list(shape)}", got)
        results = _rows(out.values), out.status
    rows, status = op(_rows(values), path, device=values.device, backend=backend, out=results)
    if out is not None:
        return out
    return GatherResult(rows if values.dim() == 3 else rows.view(shape), status)


def _rows(values: Tensor) -> Tensor:
    """The view [batch, nodes, n] of values."""
    if values.dim() == 3 and values.stride(2) == 1 and not values.requires_grad:
        return values
    rows = values.detach()
    if rows.dim() == 3 and rows.stride(2) == 1:
        return rows
    size = rows[0, 0].numel() if rows.shape[0] else 1
    return rows.as_strided((*rows.shape[:2], size), (*rows.stride()[:2], 1))
