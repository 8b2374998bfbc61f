"""Host side of every Triton launch: sizes and options."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import triton

# Ids of a tile, which one program streams; a multiple of the noise's block.
TILE = 4096
# Most values of a row among which a filter's threshold is looked for without one program reading the row.
CAPACITY = 8192
NUM_WARPS = 8
STREAM_WARPS = 4  # 32 bf16 a thread in flight
# Where one program has a row or a request to itself.
MANY_WARPS = 16
# Where a kernel looks up edits: 128 registers a thread are too few.
MANY_REGISTERS = {"num_warps": NUM_WARPS, "registers": 255}

# Without contraction the noise has the bits of the reference.
OPTIONS = {"enable_fp_fusion": False}


@functools.cache
def _is_nvidia(driver: Any) -> bool:
    return bool(driver.get_current_target().backend == "cuda")


def entry(function: Any) -> Any:
    """A kernel that is compiled for the types of its arguments alone: neither for values nor for addresses."""
    given = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[p.name for p in given if "constexpr" not in str(p.annotation)])


def size(n: int) -> int:
    """A size as a tuple takes it to a kernel, where `rows.size_of` gives it back.

    Triton compiles for the numbers in a tuple: anew for 1, and for multiples of 16. This is neither.
    """
    return 16 * n + 8


def launch(kernel: Any, programs: int, *args: Any, registers: int | None = None, **meta: Any) -> None:
    """Launch a 1-D grid; every kernel of the package goes through here.

    registers: most of a thread. NVIDIA's assembler else spills for an occupancy that some kernels do not need.
    """
    if programs > 0:
        if registers and isinstance(kernel, triton.JITFunction) and _is_nvidia(triton.runtime.driver.active):
            meta["maxnreg"] = registers
        kernel[(programs,)](*args, **{"num_warps": NUM_WARPS, **OPTIONS, **meta})


def launch_alone(kernel: Any, programs: int, *args: Any, **meta: Any) -> None:
    """Launch programs each of which has a row or a request to itself."""
    launch(kernel, programs, *args, **{"num_warps": MANY_WARPS, "registers": 65536 // (32 * MANY_WARPS), **meta})


def tiles_of(vocab: int) -> int:
    """Tiles of a row; an empty row still has one."""
    return max((vocab + TILE - 1) // TILE, 1)


def power(n: int) -> int:
    """Smallest power of two >= n, at least 1."""
    return 1 << (max(n, 1) - 1).bit_length()
