"""Runs launchers of Triton kernels on CPU tensors and compiles what they launch, for a GPU that is not there.

A stand-in for the driver poses as the GPU; `JITFunction.run` compiles and remembers the grid in place of launching.
So what is compiled is exactly what a GPU would get, ours or another package's.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {f"cuda:{cc}": GPUTarget("cuda", cc, 32) for cc in (80, 90, 100, 120)}
TARGETS["hip:gfx942"] = GPUTarget("hip", "gfx942", 64)
_devices = itertools.count()


class _Driver:
    """As much of a driver as compiling needs; each target poses as a device of its own."""

    def __init__(self, target: GPUTarget) -> None:
        self.target, self.device = target, next(_devices)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


_driver = functools.cache(_Driver)  # one device a target, or its kernels would be compiled again


class _Translated(Exception):
    """A kernel is through the front end."""


@contextmanager
def front_end_only() -> Iterator[list[str]]:
    """Inside, kernels are translated to Triton's first representation, which is kept, and compiled no further."""
    found: list[str] = []

    @staticmethod
    def keep(module: Any, metadata: Any, options: Any, *target: Any) -> None:
        names = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
        rest = {name: getattr(options, name, None) for name in names}
        found.append(f"{module.str_nodebug()}{rest}")
        raise _Translated

    whole = mock.patch.object(triton.knobs.compilation, "always_compile", True)  # not out of the cache of files
    with whole, mock.patch.object(CUDABackend, "make_ttgir", keep), mock.patch.object(HIPBackend, "make_ttgir", keep):
        yield found


class Launch(NamedTuple):
    """One launch of a call. `large` are the bytes of its tensor arguments that hold whole rows."""

    kernel: str
    blocks: int
    threads: int
    large: int
    compiled: Any  # None where only the grid was asked for
    grid: tuple[int, ...]


class Resources(NamedTuple):
    """What the assembler says of a kernel."""

    registers: int
    shared: int
    spilled: int


@contextmanager
def recorded(
    target: str,
    is_compiled: bool = True,
    row: int = 1 << 62,
    then: Callable[[Launch, dict[str, Any]], None] | None = None,
) -> Iterator[list[Launch]]:
    """Inside, launches are appended to the list; a tensor of at least `row` elements holds rows.

    `then` is called with each launch and its arguments by name.
    """
    found: list[Launch] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        options.pop("stream", None)
        names = dict(zip(self.arg_names, args, strict=False)) | options
        size = grid(names) if callable(grid) else grid
        blocks = int(functools.reduce(lambda a, b: a * b, size, 1))
        large = sum(t.numel() * t.element_size() for t in tensors((*args, *options.values())) if t.numel() >= row)
        compiled = None
        with suppress(_Translated):
            compiled = run(self, *args, grid=size, warmup=True, **options) if is_compiled else None
        threads = 32 * (compiled.metadata.num_warps if compiled else options.get("num_warps", 4))
        found.append(Launch(self.__name__, blocks, threads, large, compiled, tuple(size)))
        if then is not None:
            then(found[-1], names)
        return compiled

    driver.set_active(_driver(TARGETS[target]))
    with mock.patch.object(JITFunction, "run", record):
        yield found


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested tuples, each storage once."""
    seen = set()
    work = list(values)
    while work:
        value = work.pop()
        if isinstance(value, tuple):
            work += value
        elif isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield value


def run(target: str, call: Callable[[], None], is_compiled: bool = True, row: int = 1 << 62) -> list[Launch]:
    """What a call launches on a target."""
    with recorded(target, is_compiled, row) as found:
        call()
    return found


def resources(kernel: Any, target: str) -> Resources:
    """Registers, shared memory and spilled bytes of a compiled kernel."""
    shared, gpu = kernel.metadata.shared, TARGETS[target]
    if gpu.backend == "hip":
        text = kernel.asm["amdgcn"]
        used = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
        # Scalar registers spill into lanes of vector registers, which costs no memory; they are not counted.
        return Resources(used["vgpr_count"], shared, 4 * used["vgpr_spill_count"])
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(kernel.asm["cubin"])
        usage = {
            k: int(v)
            for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", output(TOOLS / "cuobjdump", "-res-usage", cubin))
        }
        spilled = 0
        if usage["STACK"] or usage["LOCAL"]:
            # A stack may also belong to a called function; only the assembler says what was spilled.
            ptx.write_text(kernel.asm["ptx"])
            arch = re.search(r"\.target (sm_\w+)", kernel.asm["ptx"])
            assert arch is not None
            newer = TOOLS / "ptxas-blackwell"
            ptxas = newer if gpu.arch >= 100 and newer.exists() else TOOLS / "ptxas"
            text = output(ptxas, "-v", f"--gpu-name={arch[1]}", "--fmad=false", ptx, "-o", cubin)
            spilled = sum(int(value) for value in re.findall(r"(\d+) bytes spill", text))
    return Resources(usage["REG"], shared, spilled)


def disassemble(cubin: bytes) -> str:
    """Machine code with source lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return output(TOOLS / "nvdisasm", "-c", "-gi", path)


def output(*command: Any) -> str:
    """What a tool prints; it must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
