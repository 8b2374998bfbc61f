"""Python's side of libgpusim.so, which GPUSIM_LIB names: one simulated GPU a process."""

from __future__ import annotations

import ctypes
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from . import ptx

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "simulate"
BUILT = ROOT / "build" / "gpusim" / "libgpusim.so"
FUNCTIONAL = "SM86_RTX3070"  # where no cycle is counted, any configuration will do
FAULT = re.compile(r"ERROR (?:\([^)]*\) )?(.*)")
"""What the library prints of an access or a shuffle that a GPU would not survive."""


class Fault(Exception):
    """A kernel did what no GPU allows."""


class Run(NamedTuple):
    """One launch: simulated cycles where it was timed, else instructions of threads."""

    kernel: str
    blocks: int
    threads: int
    count: int
    seconds: float
    log: str

    def statistic(self, name: str) -> float:
        """A number of the simulator's report on a timed launch."""
        found = re.findall(rf"(?m)^\s*{re.escape(name)}\s*=\s*([-\d.eE+]+)", self.log)
        return float(found[-1])


def library() -> Path | None:
    """The simulator, where there is one."""
    path = Path(os.environ.get("GPUSIM_LIB") or BUILT)
    return path if path.exists() else None


def configuration(name: str) -> Path:
    """A configuration file of the simulator; they lie beside the library unless GPUSIM_CONFIGS says where."""
    return Path(os.environ.get("GPUSIM_CONFIGS") or (library() or BUILT).parent / "configs") / f"{name}.config"


def absence() -> str | None:
    """Why nothing can be simulated here, or None."""
    if library() is None:
        return (
            "no simulator: GPUSIM_LIB names none, and make builds it only from ../shared/gpusim with bison, flex, nvcc"
        )
    if not configuration(FUNCTIONAL).exists():
        return f"no simulator configuration {configuration(FUNCTIONAL)}: GPUSIM_CONFIGS names their folder"
    return None


class Simulator:
    """A GPU. Nothing in memory may be touched but what `memory` names."""

    def __init__(self, name: str = FUNCTIONAL) -> None:
        path = library()
        assert path is not None
        os.environ["GPUSIM_CONFIG"] = str(configuration(name).resolve())
        self._library = ctypes.CDLL(str(path))
        for name in ("gs_launch", "gs_wild"):
            getattr(self._library, name).restype = ctypes.c_ulonglong
        self._c = ctypes.CDLL(None)
        self._log = tempfile.NamedTemporaryFile(prefix="gpusim-", suffix=".log")  # noqa: SIM115 - as long as the GPU
        self._ranges: list[int] = []
        self.parameters: dict[str, list[ptx.Parameter]] = {}
        with self._logged():
            self.multiprocessors = self._library.gs_init()

    @contextmanager
    def _logged(self) -> Iterator[list[str]]:
        """Standard output goes to the log; the list then holds what was printed."""
        printed: list[str] = []
        begin = os.path.getsize(self._log.name)
        kept, place = os.dup(1), os.getcwd()
        self._c.fflush(None)
        os.dup2(self._log.fileno(), 1)
        os.chdir(tempfile.gettempdir())  # it leaves files where it runs
        try:
            yield printed
        finally:
            self._c.fflush(None)
            os.chdir(place)
            os.dup2(kept, 1)
            os.close(kept)
            printed.append(Path(self._log.name).read_text(errors="replace")[begin:])

    def load(self, text: str, resources: dict[str, tuple[int, int, int]], timed: bool = False) -> None:
        """Take in a module; `resources` are registers, static shared memory and stack of each kernel."""
        self.parameters |= ptx.parameters(text)
        for name, numbers in resources.items():
            self._library.gs_info(name.encode(), *numbers, 0)
        with tempfile.NamedTemporaryFile("w", prefix="gpusim-", suffix=".ptx", delete=False) as file:
            file.write(ptx.lower(text, timed))
        with self._logged() as printed:
            self._library.gs_load(file.name.encode())
        if "yntax error" in printed[0]:
            raise ptx.Unsupported(f"PTX is not parsed: {file.name}")
        os.unlink(file.name)

    def memory(self, ranges: list[tuple[int, int]]) -> None:
        """Only these (first byte, length) may be touched from now on."""
        for first in self._ranges:
            self._library.gs_forget(ctypes.c_ulonglong(first))
        joined: list[list[int]] = []
        for first, length in sorted(ranges):
            if joined and first <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], first + length)
            elif length > 0:
                joined.append([first, first + length])
        for first, end in joined:
            self._library.gs_register(ctypes.c_ulonglong(first), ctypes.c_ulonglong(end - first))
        self._ranges = [first for first, _ in joined]

    def launch(
        self, kernel: str, grid: tuple[int, ...], threads: int, arguments: list[bytes], shared: int, timed: bool
    ) -> Run:
        """Run a kernel; a fault raises."""
        places = self.parameters[kernel]
        assert [len(a) for a in arguments] == [p.size for p in places], kernel
        count = len(places)
        buffers = [ctypes.create_string_buffer(a + bytes(8)) for a in arguments]  # the library reads whole words
        pointers = (ctypes.c_void_p * count)(*[ctypes.cast(b, ctypes.c_void_p) for b in buffers])
        sizes = (ctypes.c_uint * count)(*[p.size for p in places])
        offsets = (ctypes.c_uint * count)(*[p.offset for p in places])
        wild, started = self._library.gs_wild(), time.monotonic()
        with self._logged() as printed:
            result = self._library.gs_launch(
                kernel.encode(),
                *(*grid, 1, 1)[:3],
                threads,
                1,
                1,
                shared,
                count,
                pointers,
                sizes,
                offsets,
                int(not timed),
            )
        faults = FAULT.findall(printed[0])
        if faults or self._library.gs_wild() != wild:
            raise Fault(f"{kernel}, grid {grid}: {len(faults)} faults, the first: {faults[0] if faults else 'wild'}")
        return Run(kernel, math.prod(grid), threads, result, time.monotonic() - started, printed[0])
