"""tree_mask, spelled plainly: one predicate (`_trees.attends`), written in the order each format asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _trees
from ..._codes import MASK_FORMATS, Status

LONGEST_CACHE = 2**40  # products with it do not overflow
BOOL, ADDITIVE, FLAT, FLAT_PACKED, INT32, INT64, XQA, SGLANG_PACKED = MASK_FORMATS.values()


def tree_mask(
    parents: Tensor,
    past: Tensor | None,
    left_padding: Tensor | None,
    window: int,
    size: int,
    format: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec_kernels.tree_mask`."""
    batch, nodes = parents.shape
    tree = _trees.tree(parents, nodes - 1)
    status = torch.where(tree.bad, Status.BAD_LAYOUT, 0).int()
    none = torch.zeros(batch, dtype=torch.int64, device=parents.device)
    past = none if past is None else past.clamp(0, LONGEST_CACHE)
    left_padding = none if left_padding is None else left_padding
    common = (_trees.pack(tree.ancestors, 32), tree.depth, past, left_padding, window)
    if format in (FLAT, FLAT_PACKED):
        mask, offsets = _flat(common, past, nodes, size, packed=format == FLAT_PACKED)
        return mask, offsets, status

    request = torch.arange(batch, device=parents.device)[:, None, None]
    key = torch.arange(size, device=parents.device)
    seen = _trees.attends(*common, request, tree.node[:, None], key)
    offsets = parents.new_empty(0, dtype=torch.int64)
    if format == BOOL:
        return seen[:, None], offsets, status
    if format == ADDITIVE:
        zero = torch.zeros((), dtype=dtype, device=parents.device)
        return torch.where(seen, zero, torch.finfo(dtype).min)[:, None], offsets, status
    return _words(seen, format, dtype), offsets, status


def _words(seen: Tensor, format: int, dtype: torch.dtype) -> Tensor:
    """Bits of each query over the nodes, lowest first, as words of `dtype`."""
    words = _trees.pack(seen, 32)
    if format == INT64:
        words = torch.nn.functional.pad(words, (0, words.shape[-1] % 2))
    words = words.view(dtype)
    return words[..., 0].flatten() if format == SGLANG_PACKED else words


def _flat(
    common: tuple[Tensor, Tensor, Tensor, Tensor, int], past: Tensor, nodes: int, size: int, *, packed: bool
) -> tuple[Tensor, Tensor]:
    """Rows [nodes, past + nodes] of every request, one after the other; packed: each request starts a byte."""
    keys = past + nodes
    lengths = (keys * nodes + 7) // 8 if packed else keys * nodes
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    element = torch.arange(size, device=past.device)
    if len(past) == 0:
        return torch.zeros(size, dtype=torch.uint8 if packed else torch.bool, device=past.device), offsets
    request = (torch.searchsorted(offsets, element, right=True) - 1).clamp(max=len(past) - 1)
    inside = element - offsets[request]
    if packed:
        element, request = element[:, None], request[:, None]
        inside = inside[:, None] * 8 + torch.arange(8, device=past.device)
    width = keys[request]
    query = inside // width
    seen = _trees.attends(*common, request, query.clamp(max=nodes - 1), inside % width) & (query < nodes)
    return (_trees.pack(seen, 8)[:, 0] if packed else seen), offsets
