"""SGLang's mover of cache rows, called with the tiles that its pool chooses for this row size.

One launch for all layers, as ours; but it moves slots of a pool only (its HND layout is a loop over layers), copies
rows that are already in place, and takes slot numbers that were computed before: they are not in its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _sglang
from ._sglang import version

__all__ = ["version"]
NAME = "SGLang mover"
WHY = "SGLang's `move_kv_cache`, called after a tree is verified"
ORDER = 10
FILE = "kernels/ops/kvcache/cache_move.py"
CHUNK = 256  # rows of a launch


def available() -> str | None:
    """None, or why it cannot run here."""
    return _sglang.available(FILE)


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    return None if case.format == "nhd" else "it moves slots of an NHD pool"


def prepare(tensors: Sequence[Tensor], source: Tensor, target: Tensor) -> tuple[Any, ...]:
    """(addresses, bytes of each slot, target slots, source slots, bytes of one), as its pool keeps them; not timed."""
    row = tensors[0][0, 0].numel() * tensors[0].element_size()
    addresses = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64, device=source.device)
    return addresses, torch.full_like(addresses, row, dtype=torch.int64), target, source, row


def compact_cache(prepared: tuple[Any, ...]) -> None:
    """Move the rows; all of a chunk are read before one is written."""
    addresses, strides, target, source, row = prepared
    kernel = _sglang.load(FILE).copy_all_layer_kv_cache_tiled
    tile = 512 if row >= 8192 else 256 if row >= 4096 else 128
    chunk = 128 if tile == 512 else CHUNK
    for start in range(0, len(target), chunk):
        rows = min(chunk, len(target) - start)
        kernel[(len(addresses), -(-row // tile))](
            addresses, strides, target[start:], source[start:], rows, 1 << (rows - 1).bit_length(),
            BYTES_PER_TILE=tile, num_warps=8 if tile == 512 else 4, num_stages=2,
        )  # fmt: skip
