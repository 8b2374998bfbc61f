"""Attention masks of candidate trees, in the formats that attention kernels take."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._check import SIZE_BITS, Checker, fail, outputs
from ..._codes import MASK_FORMATS, Backend, MaskFormat
from ..._op import Op, Shape
from . import reference

_WORDS = {"int32": torch.int32, "int64": torch.int64, "xqa": torch.uint16}
_ADDITIVE = (torch.float32, torch.bfloat16, torch.float16)


class TreeMask(NamedTuple):
    """Result of `tree_mask`.

    Attributes:
        mask: in the format asked for.
        offsets: int64 ``[batch + 1]`` first element (of packed: byte) of each request and the end; of flat formats,
            else None.
        status: int32 ``[batch]``: 32 malformed parents, then the tree is its root alone.
    """

    mask: Tensor
    offsets: Tensor | None
    status: Tensor


def _shape(batch: int, nodes: int, size: int, code: int, dtype: torch.dtype) -> tuple[int, ...]:
    if code in (MASK_FORMATS["bool"], MASK_FORMATS["additive"]):
        return batch, 1, nodes, size
    if code in (MASK_FORMATS["flat"], MASK_FORMATS["flat_packed"]):
        return (size,)
    if code == MASK_FORMATS["sglang_packed"]:
        return (batch * nodes,)
    words = (nodes + 31) // 32
    return batch, nodes, {torch.int64: (words + 1) // 2, torch.uint16: 2 * words}.get(dtype, words)


def _shapes(parents: Tensor, *rest: Any) -> tuple[Shape, ...]:
    size, code, dtype = rest[3:]
    batch, nodes = parents.shape
    is_flat = code in (MASK_FORMATS["flat"], MASK_FORMATS["flat_packed"])
    mask = _shape(batch, nodes, size, code, dtype)
    return (mask, dtype), ((batch + 1 if is_flat else 0,), torch.int64), ((batch,), torch.int32)


op = Op(reference.tree_mask, _shapes, results=TreeMask._fields)


def tree_mask(
    parents: Tensor,
    *,
    past: int | Tensor | None = None,
    left_padding: Tensor | None = None,
    window: int = 0,
    format: MaskFormat = "bool",
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
    out: TreeMask | None = None,
    backend: Backend | None = None,
) -> TreeMask:
    """The attention mask of a tree: a node attends what is cached, its ancestors and itself.

    Key columns of a request: ``left_padding`` unused ones, cached tokens up to ``past``, the nodes, unused ones.
    Without `past` the columns are the nodes alone (query-only). A padding node attends itself alone: no row is empty.

    Formats, all from the same bits, the lowest bit first where they are packed:

    * ``bool``: bool ``[batch, 1, nodes, size]``, True attends; as transformers and SDPA take it.
    * ``additive``: `dtype` ``[batch, 1, nodes, size]``: 0, or the dtype's minimum.
    * ``flat``: bool ``[size]``, rows ``[nodes, past + nodes]`` of each request in turn: FlashInfer's custom_mask,
      SGLang's FULL_MASK; without `past` its QLEN_ONLY.
    * ``flat_packed``: uint8 ``[size]``, each request starts a byte: FlashInfer's packed_custom_mask.
    * ``int32``: int32 ``[batch, nodes, ceil(nodes / 32)]``, query-only: TensorRT-LLM.
    * ``int64``: int64 ``[batch, nodes, ceil(nodes / 64)]``, query-only.
    * ``xqa``: uint16 ``[batch, nodes, 2 ceil(nodes / 32)]``, query-only: XQA.
    * ``sglang_packed``: ``[batch * nodes]`` of uint8, uint16 or uint32, whichever holds the nodes, 32 at most;
      query-only: SGLang's QLEN_ONLY_BITPACKING.

    Args:
        parents: int32 or int64 ``[batch, nodes]``, see `tree_layout`.
        past: column of node 0: cached tokens with their left padding, an int or int64 ``[batch]``, below 2^40.
        left_padding: int64 ``[batch]``, unused columns at the start.
        window: sliding window, 0 is off: a node attends what lies less than `window` positions before it.
        format: see the table.
        dtype: of ``additive``: float32, bfloat16 or float16.
        size: key columns (``bool``, ``additive``) or elements (flat formats; what lies behind the last request is
            False), a host int; needed where `past` is a tensor.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        TreeMask.

    Raises:
        ValueError: wrong shapes, dtypes, devices or combinations.

    Example:
        >>> import torch
        >>> from specdec_kernels import tree_mask
        >>> tree_mask(torch.tensor([[-1, 0, 0, 1]]), past=1).mask[0, 0].int()
        tensor([[1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [1, 1, 0, 1, 0],
                [1, 1, 1, 0, 1]], dtype=torch.int32)
    """
    name = "tree_mask"
    check = Checker.of(name, "parents", parents, "of int32 or int64")
    batch, nodes = check.parents(parents)
    code = check.choice("format", format, MASK_FORMATS)
    if dtype not in (_ADDITIVE if format == "additive" else _ADDITIVE[:1]):
        expected = "float32, bfloat16 or float16" if format == "additive" else f"left out for format {format!r}"
        fail(name, "dtype", expected, dtype)
    check.size("window", window, 0)
    cached = past if isinstance(past, int) else None if isinstance(past, Tensor) else 0
    if isinstance(past, int):
        past = torch.full((batch,), check.size("past", past, 0, SIZE_BITS), device=parents.device)
    elif past is not None:
        past = check.vector("past", past, (torch.int64,), batch)
    if left_padding is not None:
        left_padding = check.vector("left_padding", left_padding, (torch.int64,), batch)
    if format in _WORDS or format == "sglang_packed":
        for argument, value in (("past", past), ("left_padding", left_padding), ("size", size)):
            if value is not None:
                fail(name, argument, f"left out for format {format!r}: its columns are the nodes", type(value).__name__)
        if format == "sglang_packed" and nodes > 32:
            fail(name, "parents", "of at most 32 nodes for format 'sglang_packed'", list(parents.shape))
        dtype, size = _WORDS.get(format) or _smallest(nodes), nodes
    elif format != "additive":
        dtype = torch.uint8 if format == "flat_packed" else torch.bool
    size = _default_size(batch, nodes, cached, format) if size is None else check.size("size", size, 0, SIZE_BITS)
    given = outputs(name, out, TreeMask, "offsets", torch.int64, is_wanted=True)
    results = op(
        parents, past, left_padding, window, size, code, dtype, device=parents.device, backend=backend, out=given
    )
    mask, offsets, status = results
    return TreeMask(mask, offsets if format in ("flat", "flat_packed") else None, status)


def _smallest(nodes: int) -> torch.dtype:
    return torch.uint8 if nodes <= 8 else torch.uint16 if nodes <= 16 else torch.uint32


def _default_size(batch: int, nodes: int, cached: int | None, format: MaskFormat) -> int:
    if cached is None:
        fail("tree_mask", "size", "given where past is a tensor: its values are not read on the host", None)
    keys = cached + nodes
    return {"flat": batch * nodes * keys, "flat_packed": batch * ((nodes * keys + 7) // 8)}.get(format, keys)
