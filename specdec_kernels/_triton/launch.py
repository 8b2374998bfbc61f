"""Host side of every Triton launch: tile sizes, ticket counters, scratch memory, options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Ids a program loads at once. 4096 keeps a tile in 16 registers a thread at 8 warps, and its partial results under
# half a per cent of its bytes. Tests patch it to see many tiles in a short row.
TILE = 4096
# Largest values of a tile that are listed when a filter is on, and the tile's random sample (one of 32).
LISTED = 128
STRATUM = 32
# Most elements of one row that may lie strictly between the two ends of a threshold's bracket.
GATHERED = 8192
NUM_WARPS = 8
# For the longest kernels: tools/compile_triton.py sees them spill at 8.
MANY_WARPS = 16

# Without contraction the noise has the bits of the reference.
OPTIONS = {"enable_fp_fusion": False}

_counters: dict[tuple[torch.device, int], Tensor] = {}


def counters(count: int, device: torch.device) -> Tensor:
    """int32 zeros for tickets; kernels leave them at zero, so one allocation serves a stream for ever."""
    if device.type == "cpu":
        return torch.zeros(count, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        # A graph may replay beside eager work of this stream: it gets tickets of its own, zeroed in the graph.
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    have = _counters.get(key)
    if have is None or have.numel() < count:
        have = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        _counters[key] = have
    return have


def launch(kernel: Any, programs: int, *args: Any, **meta: Any) -> None:
    """Launch a 1-D grid; every kernel of the package goes through here."""
    if programs > 0:
        kernel[(programs,)](*args, **{"num_warps": NUM_WARPS, **OPTIONS, **meta})


def tiles_of(vocab: int) -> int:
    """Tiles of a row; an empty row still has one, whose program merges."""
    return max((vocab + TILE - 1) // TILE, 1)


def power(n: int) -> int:
    """Smallest power of two >= n, at least 1."""
    return 1 << (max(n, 1) - 1).bit_length()
