"""Launches of CUDA kernels, sent to the simulator: the host side is that of the tests, the kernels are nvcc's PTX."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..gpu_model import cuda
from . import ptx
from .gpgpusim import BUILD, ROOT, Run, Simulator
from .memory import Watch

sys.path.insert(0, str(ROOT / "tests"))
from native.build import build, load_backend

sys.path.insert(0, str(ROOT / "tools"))
from compile_cuda import FLAGS, INCLUDE, parse

ARCH = 80
FEW = 2  # multiprocessors where nothing is timed: blocks take several turns
CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_uint),
)  # fmt: skip


@functools.cache
def load_host() -> Path:
    """The CUDA sources for the host, as a backend of every op."""
    library = build()
    load_backend(library)
    return library


def names_of(library: Path) -> dict[int, str]:
    """Symbols of functions, by their place in a library."""
    listed = subprocess.run(["nm", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return {int(place, 16): plain(name) for place, _, name in map(str.split, listed.stdout.splitlines())}


def base_of(library: Path) -> int:
    """Where a library is loaded."""
    line = next(one for one in Path("/proc/self/maps").read_text().splitlines() if one.endswith(str(library.resolve())))
    return int(line.split("-")[0], 16)


def plain(symbol: str) -> str:
    """A symbol without what a compiler makes of `namespace {`: each writes its own name there."""
    found = re.search(r"(\d+)_GLOBAL__N_", symbol)
    if found is None:
        return symbol
    end = found.end(1) + int(found[1])
    return f"{symbol[: found.start()]}12_GLOBAL__N_1{symbol[end:]}"


@functools.cache
def source_of(kernel: str) -> Path:
    """The file that defines a kernel, from its symbol."""
    for source in cuda.sources():  # a kernel of a header is the same in all that include it
        text = "".join(path.read_text() for path in cuda.included(source))
        if any(f"{len(name)}{name}" in kernel for name in re.findall(r"\b(\w+_kernel)\(\s*const __grid", text)):
            return source
    raise LookupError(kernel)


@functools.cache
def inlined_sources() -> Path:
    """A copy of the sources without functions that are called: the simulator passes structures wrongly."""
    copy = BUILD / "csrc"
    shutil.copytree(ROOT / "csrc", copy, dirs_exist_ok=True)
    header = copy / "cuda/platform.cuh"
    text, count = re.subn(r"(#define SPECDEC_NOINLINE) __noinline__", r"\1 __forceinline__", header.read_text())
    assert count == 1
    header.write_text(text)
    for path in (copy / "cuda").glob("*.cu*"):
        path.write_text(path.read_text().replace("__device__ inline ", "__device__ __forceinline__ "))
    return copy


def ptx_of(source: Path) -> Path:
    """A source's PTX, compiled once of the same text."""
    path = BUILD / "cuda" / f"{source.stem}-all-inlined-{cuda.digest(cuda.included(source))}.ptx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        compiler = cuda.nvcc()
        assert compiler is not None
        flags = [flag for flag in FLAGS if not flag.endswith(("-Xptxas", "-v"))]
        copy = inlined_sources()
        command = [compiler, *flags, f"-arch=compute_{ARCH}", f"-I{copy}", "-isystem", str(INCLUDE)]
        subprocess.run(
            [*command, "-ptx", str(copy / source.relative_to(ROOT / "csrc")), "-o", f"{path}.part"], check=True
        )
        text = Path(f"{path}.part").read_text()
        for name in ptx.parameters(text):
            text = text.replace(name, plain(name))
        Path(f"{path}.part").write_text(text)
        Path(f"{path}.part").rename(path)
    return path


def resources_of(source: Path) -> dict[str, tuple[int, int, int]]:
    """Registers, shared memory and stack of a source's kernels on sm_80, from the assembler."""
    path = ptx_of(source)
    log = path.with_suffix(".log")
    if not log.exists():
        compiler = cuda.nvcc()
        assert compiler is not None
        assembler = Path(compiler).resolve().parent / "ptxas"
        command = [shutil.which("ptxas") or str(assembler), "-v", f"-arch=sm_{ARCH}", str(path), "-o", "/dev/null"]
        log.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
    return {use.kernel: (use.registers, use.shared, use.stack) for use in parse(log.read_text())}


@contextmanager
def simulated(gpu: Simulator, timed: bool = False) -> Iterator[list[Run]]:
    """Inside, launches of the backend `cuda_host` run in the simulator."""
    library = load_host()
    names, base, runs, failures, watch = names_of(library), base_of(library), [], [], Watch()

    def execute(kernel: int, blocks: int, threads: int, count: int, pointers: Any, sizes: Any) -> None:
        if failures:
            return
        try:
            name = names[kernel - base]
            if name not in gpu.parameters:
                source = source_of(name)
                gpu.load(ptx_of(source).read_text(), resources_of(source) if timed else {}, timed)
            arguments = [ctypes.string_at(pointers[i], sizes[i]) for i in range(count)]
            gpu.memory(watch.ranges())
            runs.append(gpu.launch(name, (blocks,), threads, arguments, 0, timed))
        except Exception as error:  # it cannot cross the C++ of the op
            failures.append(error)

    callback = CALLBACK(execute)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    processors = gpu.multiprocessors if timed else FEW  # the grid of a kernel that stays depends on it
    torch.ops.specdec_kernels.cuda_host_elsewhere(address, processors)
    try:
        with watch:
            yield runs
    finally:
        torch.ops.specdec_kernels.cuda_host_elsewhere(0, FEW)
    if failures:
        raise failures[0]
