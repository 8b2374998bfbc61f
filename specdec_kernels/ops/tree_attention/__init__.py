"""Attention of a candidate tree over a long cache and over its own nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._cache import FORMATS, PAGED
from ..._check import ID_DTYPES, LOGIT_DTYPES, MAX_NODES, Checker, fail
from ..._codes import Backend, CacheFormat
from ..._op import Op, Shape
from . import reference

MAX_DIM, MAX_VALUE_DIM = 576, 512  # of latent attention, the largest in use
_FINITE = 3.4e38  # float32 holds it
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_AXES = {
    "bhld": ("batch", "head", "length", "dim"),
    "blhd": ("batch", "length", "head", "dim"),
    "nhd": ("page", "slot", "head", "dim"),
    "hnd": ("page", "head", "slot", "dim"),
    "slots": ("slot", "head", "dim"),
}


class TreeAttention(NamedTuple):
    """Result of `tree_attention`.

    Attributes:
        output: ``[batch, nodes, heads, value_dim]`` in the query's dtype; 0 where nothing is attended.
        logsumexp: float32 ``[batch, nodes, heads]``, natural logarithm of the sum of exp(scaled score); -inf where
            nothing is attended. Two attentions over disjoint keys are merged by it.
        status: int32 ``[batch]``: 32 where a length is negative, the tree does not fit behind it, or a row that is
            needed has no page; nothing of that request is attended.
    """

    output: Tensor
    logsumexp: Tensor
    status: Tensor


def _shapes(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Shape, ...]:
    rows = query.shape[:3]
    return ((*rows, value.shape[-1]), query.dtype), (rows, torch.float32), (rows[:1], torch.int32)


op = Op(reference.tree_attention, _shapes, results=TreeAttention._fields, backends=("cpu", "triton"))


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ancestors: Tensor,
    lengths: Tensor,
    *,
    format: CacheFormat = "bhld",
    block_table: Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: TreeAttention | None = None,
    backend: Backend | None = None,
) -> TreeAttention:
    """Attention of every node over what is cached, its ancestors and itself, without a mask in memory.

    With ``L = lengths[b]``, node n attends positions x < L and position L + j iff bit j of ``ancestors[b, n]``:

        ``output[b, n, h] = sum_x p_x value[x, g]``, ``p = softmax_x(scale query[b, n, h] . key[x, g])``, g = h // group

    The tree's own keys and values are in the cache already, node j's at position L + j, as `compact_cache` assumes.
    Padding (a node without the root among its ancestors) attends nothing, and its rows are not read; nor are rows
    behind the last node, nor, with a window, those that it hides from all nodes, so their pages may be gone.
    Sums are float32; weights may be rounded to the query's dtype before they multiply the values, as in flash
    attention. A request's result has the same bits in any batch and slot.

    **Latent attention** (MLA). All heads share one row, of a latent and a rotary part. Pass it as the key, with one
    head, and its first columns as the value: ``key, key[..., :512]``. GPU kernels then read a row once.

    **8-bit caches.** Keys and values may be float8 beside any dtype of the query. They stand for what they hold times
    the scale of their head. Backend triton takes 16-bit queries beside them, and where dims exceed 256.

    Args:
        query: float32, bfloat16 or float16 ``[batch, nodes, heads, dim]``, dense in its last axis; nodes <= 1024.
        key: one layer's keys in the query's dtype, float8_e4m3fn or float8_e5m2; ``kv_heads`` a divisor of ``heads``,
            dim at most 576, dense in their last axis; their axes as in `format`.
        value: its values in the keys' dtype; value_dim may differ from dim, at most 512.
        ancestors: int32 ``[batch, nodes, ceil(nodes / 32)]``, as `tree_layout` returns them.
        lengths: int32 or int64 ``[batch]``: rows in the cache before this step's.
        format: ``"bhld"``, ``"blhd"``, ``"nhd"``, ``"hnd"`` or ``"slots"``, see `CacheLayout`; every axis is there.
        block_table: int32 or int64 ``[batch, pages]`` for the last three, see `CacheLayout`.
        scale: of the scores, by default ``dim ** -0.5``.
        window: sliding window, 0 is off: a node attends what lies less than `window` positions before it; a node's
            position is L + its depth.
        key_scale: float32 ``[kv_heads]`` or ``[]``, what float8 keys are multiplied by; None: 1.
        value_scale: the same of the values.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        TreeAttention.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import tree_attention, tree_layout
        >>> layout = tree_layout(torch.tensor([[-1, 0, 0]]), max_depth=1)  # a root and two children
        >>> query, key = torch.zeros(1, 3, 1, 2), torch.zeros(1, 1, 5, 2)
        >>> value = torch.tensor([3.0, 5.0, 7.0, 9.0, -1.0]).view(1, 1, 5, 1)  # two cached rows, then the tree's
        >>> tree_attention(query, key, value, layout.ancestors, torch.tensor([2])).output.flatten()
        tensor([5.0000, 6.0000, 3.5000])
    """
    name = "tree_attention"
    check = Checker.of(name, "query", query, "[batch, nodes, heads, dim]")
    check.tensor("query", query, LOGIT_DTYPES, ("batch", "nodes", "heads", "dim"))
    batch, nodes, heads, dim = query.shape
    if not 1 <= nodes <= MAX_NODES:
        fail(name, "query", f"of 1 (the root) to {MAX_NODES} nodes", list(query.shape))
    check.choice("format", format, FORMATS)
    if format in PAGED:
        check.tensor("block_table", block_table, ID_DTYPES, (batch, "pages"))
        assert block_table is not None
        if block_table.shape[1] == 0 or (block_table.shape[1] > 1 and block_table.stride(1) != 1):
            fail(name, "block_table", "of at least one page, dense in its last axis", f"{block_table.stride()}")
    elif block_table is not None:
        fail(name, "block_table", f"None for format {format!r}", type(block_table).__name__)
    keys, values = _pages(check, "key", key, query, format), _pages(check, "value", value, query, format)
    for argument, tensor, most in (("query", query, MAX_DIM), ("key", keys, MAX_DIM), ("value", values, MAX_VALUE_DIM)):
        size, stride = tensor.shape[3], tensor.stride()[3]
        if not 1 <= size <= most:
            fail(name, argument, f"of dim 1 to {most}", size)
        if size > 1 and stride != 1:
            fail(name, argument, "dense in its last axis (call .contiguous())", f"stride {stride}")
    pages, slots, kv_heads, key_dim = keys.shape
    if key_dim != dim:
        fail(name, "key", f"of dim {dim}, as the query", key_dim)
    if values.dtype != keys.dtype:
        fail(name, "value", f"{keys.dtype}, as the key", values.dtype)
    if values.shape[:3] != (pages, slots, kv_heads):
        fail(name, "value", f"as key but for its dim, {list(key.shape[:-1])}", list(value.shape[:-1]))
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        fail(name, "query", f"of a multiple of {kv_heads} heads, the key's", heads)
    if format not in PAGED and pages != batch:
        fail(name, "key", f"of batch {batch}", pages)
    if slots == 0 or (format in PAGED and pages == 0):
        fail(name, "key", "of at least one row", list(key.shape))
    check.dense("ancestors", ancestors, (torch.int32,), (batch, nodes, (nodes + 31) // 32))
    check.vector("lengths", lengths, ID_DTYPES, batch)
    check.size("window", window, 0)
    key_scale = _scale(check, "key_scale", key_scale, keys)
    value_scale = _scale(check, "value_scale", value_scale, keys)
    scale = dim**-0.5 if scale is None else scale
    if not isinstance(scale, (int, float)) or not abs(scale) <= _FINITE:
        fail(name, "scale", f"a number in [-{_FINITE:g}, {_FINITE:g}]", repr(scale))
    results = op(
        query, keys, values, ancestors, lengths, block_table, scale, window, key_scale, value_scale,
        device=query.device, backend=backend, out=out,
    )  # fmt: skip
    return TreeAttention(*results)


def _pages(check: Checker, name: str, rows: Tensor, query: Tensor, format: CacheFormat) -> Tensor:
    """The view [page, slot, head, dim] of keys or values."""
    check.tensor(name, rows, (query.dtype, *FLOAT8), _AXES[format])
    rows = rows.unsqueeze(1) if format == "slots" else rows
    return rows.transpose(1, 2) if FORMATS[format] == (0, 2) else rows  # movedim costs twice as much


def _scale(check: Checker, name: str, scale: Tensor | None, keys: Tensor) -> Tensor | None:
    """Scales of 8-bit rows, a number a head."""
    if scale is None:
        return None
    if keys.dtype not in FLOAT8:
        fail("tree_attention", name, f"None for keys in {keys.dtype}", type(scale).__name__)
    kv_heads = keys.shape[2]
    is_scalar = isinstance(scale, Tensor) and scale.dim() == 0
    check.tensor(name, scale, (torch.float32,), () if is_scalar else (kv_heads,))
    return scale.expand(kv_heads)
