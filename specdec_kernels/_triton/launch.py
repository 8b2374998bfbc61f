"""Host side of every Triton launch: sizes and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton

from . import direct

# Ids of a tile, which one program streams; a multiple of the noise's block.
TILE = 4096
# Most values of a row among which a filter's threshold is looked for without one program reading the row.
CAPACITY = 8192
NUM_WARPS = 8
# Of a tile that is streamed: 32 ids a thread. Where one sum is made of it, warps of 64 a thread wait less for one
# another: 43.8 us instead of 54.7 for `ratio` of 64 requests and 128256 ids, says the model of an H200.
STREAM_WARPS, SUM_WARPS = 4, 2
STREAM_REGISTERS = 128  # else two sums with edits spill on sm_80
# Where one program has a request, or a tile that it takes long for.
MANY_WARPS = 16
# A program that has a request to itself takes as many registers as its threads can have.
ALONE = {"num_warps": MANY_WARPS, "registers": 65536 // (32 * MANY_WARPS)}
# Of rows there are more than multiprocessors: each has two.
ROW_ALONE = {"num_warps": NUM_WARPS, "registers": 65536 // (2 * 32 * NUM_WARPS)}
# Where thresholds are searched: top-k and top-p of 128256 ids take 34,900 simulated cycles; 8 warps took as many, and
# half as many instructions again. Three rows share a multiprocessor.
SEARCH_ALONE = {"num_warps": 4, "registers": 168}
# Where a row is settled by its digest and a race: three a multiprocessor. By its digest alone: 64 lanes of work, one a
# thread as with more warps, so sums keep their order.
RACE_ALONE, FEW_LANES = {"num_warps": NUM_WARPS, "registers": 80}, {"num_warps": 2}
# Where a kernel looks up edits, or lists many ids: 128 registers a thread are too few.
MANY_REGISTERS = {"num_warps": NUM_WARPS, "registers": 255}

# Without contraction the noise has the bits of the reference.
OPTIONS = {"enable_fp_fusion": False}


def entry(function: Any, **how: Any) -> Any:
    """A kernel that is compiled for the types of its arguments, not for their values and addresses.

    Inside a record Triton asks all the same whether an int is 1, and whether it or an address is a multiple of 16.
    """
    given = inspect.signature(function).parameters.values()
    loose = [p.name for p in given if "constexpr" not in str(p.annotation)]
    return triton.jit(function, do_not_specialize=loose, **how)


def size(n: int) -> int:
    """A size as a tuple takes it to a kernel, where `rows.size_of` gives it back.

    Triton compiles for the numbers in a tuple: anew for 1, and for multiples of 16. This is neither.
    """
    return 16 * n + 8


class Launches:
    """Launches of 1-D grids, made in order by each call: what several have in common is looked at once.

    They are for the device and the stream on which they were added. seen: as `launch` takes it.
    """

    def __init__(self, seen: direct.Seen) -> None:
        self._launches: list[Callable[[], object]] = []
        self._seen = seen

    def add(self, kernel: Any, programs: int, *args: Any, registers: int | None = None, **meta: Any) -> Launches:
        """One more, as `launch` makes it."""
        if programs > 0:
            options = _options(kernel, registers, meta)
            self._launches.append(direct.prepare(kernel, programs, args, options, self._seen))
        return self

    def __call__(self) -> None:
        for launch in self._launches:
            launch()


def launch(kernel: Any, programs: int, *args: Any, registers: int | None = None, seen: Any = None, **meta: Any) -> None:
    """Launch a 1-D grid; every kernel of the package goes through here or through `Launches`.

    registers: most of a thread. NVIDIA's assembler else spills for an occupancy that some kernels do not need.
    seen: `direct.Seen`, what launches of the same call have looked at; an empty dict at first.
    """
    if programs > 0:
        direct.prepare(kernel, programs, args, _options(kernel, registers, meta), seen)()


def _options(kernel: Any, registers: int | None, meta: dict[str, Any]) -> dict[str, Any]:
    if registers and isinstance(kernel, triton.JITFunction) and direct.is_nvidia(triton.runtime.driver.active):
        meta["maxnreg"] = registers
    return {"num_warps": NUM_WARPS, **OPTIONS, **meta}


def launch_alone(kernel: Any, programs: int, *args: Any, **meta: Any) -> None:
    """Launch programs each of which has a row or a request to itself."""
    launch(kernel, programs, *args, **{**ALONE, **meta})


def tiles_of(vocab: int) -> int:
    """Tiles of a row; an empty row still has one."""
    return max((vocab + TILE - 1) // TILE, 1)


def power(n: int) -> int:
    """Smallest power of two >= n, at least 1."""
    return 1 << (max(n, 1) - 1).bit_length()
