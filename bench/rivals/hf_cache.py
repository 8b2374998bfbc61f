"""transformers' DynamicCache after a tree: crop the step's rows, append those of the path.

Its `update` concatenates, so every layer is allocated and copied whole. All requests of a batch must be equally long:
it takes one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .hf import available, version

__all__ = ["available", "version"]
NAME = "transformers crop + cat"
WHY = "`DynamicCache.crop` and `update`, as transformers rolls a cache back and grows it"
ORDER = 7


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    fits = case.batch == 1 and case.format == "bhld"
    return None if fits else "its requests are equally long, [batch, head, length, dim]"


def compact_cache(tensors: Sequence[Tensor], start: int, nodes: int, rows: Tensor) -> list[Tensor]:
    """Keys and values that then hold the committed rows and those of root and path."""
    from transformers.cache_utils import DynamicLayer

    found: list[Tensor] = []
    for keys, values in zip(tensors[::2], tensors[1::2], strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[:, :, : start + nodes], values[:, :, : start + nodes]  # as the forward left it
        path = layer.keys[:, :, rows], layer.values[:, :, rows]
        layer.crop(-nodes)
        found += layer.update(*path)
    return found
