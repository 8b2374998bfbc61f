"""Compile every CUDA source for every architecture we name and print what each kernel uses; a spill fails.

Needs nvcc, no GPU: `python tools/compile_cuda.py [--arch 80 90 100 120] [--source tree_mask]`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = Path(torch.__file__).parent / "include"
FLAGS = ["-std=c++20", "-O3", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-Xptxas", "-v"]

_KERNEL = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
_FUNCTION = re.compile(r"Function properties for (\w+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class Usage(NamedTuple):
    """Resources of one kernel on one architecture, from the assembler."""

    arch: int
    kernel: str
    registers: int
    shared: int
    stack: int
    spills: int


def parse(log: str) -> list[Usage]:
    """Kernels of one compilation; a spill of a function that a kernel calls counts as the kernel's."""
    found: list[Usage] = []
    kernel, arch, stack, spills = "", 0, 0, 0
    for line in log.splitlines():
        if match := _KERNEL.search(line):
            kernel, arch, stack, spills = match[1], int(match[2]), 0, 0
        elif _FUNCTION.search(line):
            continue
        elif match := _SPILLS.search(line):
            stack, spills = max(stack, int(match[1])), spills + int(match[2]) + int(match[3])
            # Functions that were not inlined are reported behind the kernel they belong to.
            if found and not kernel:
                found[-1] = found[-1]._replace(spills=found[-1].spills + int(match[2]) + int(match[3]))
        elif (match := _USED.search(line)) and kernel:
            shared = _SHARED.search(line)
            found.append(Usage(arch, kernel, int(match[1]), int(shared[1]) if shared else 0, stack, spills))
            kernel = ""
    return found


def compile_source(nvcc: str, source: Path, arches: list[str]) -> tuple[Path, float, list[Usage]]:
    """Compile to a throw-away object file."""
    start = time.monotonic()
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in arches]
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *FLAGS, *codes, f"-I{ROOT / 'csrc'}", "-isystem", str(INCLUDE), "-c", str(source)]
        run = subprocess.run([*command, "-o", str(Path(folder, "out.o"))], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{source.relative_to(ROOT)}:\n{run.stdout}{run.stderr}")
    return source, time.monotonic() - start, parse(run.stdout + run.stderr)


def short_name(mangled: str) -> str:
    """`pair_kernel<..>` instead of its mangled form."""
    tool = shutil.which("c++filt")
    name = subprocess.run([tool, mangled], capture_output=True, text=True).stdout if tool else mangled
    name = re.sub(r"\(anonymous namespace\)::|\((specdec::Pass|specdec::LogitType|bool)\)|(?<=\d)u\b", "", name.strip())
    return re.sub(r"^void |specdec::|\(.*\)$", "", name)


def main() -> None:
    """Print a line a kernel and architecture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", nargs="+", default=["80", "90", "100", "120"])
    parser.add_argument("--source", nargs="+", default=["*"], help="names of files in csrc/cuda, without .cu")
    chosen = parser.parse_args()
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin")) if home else None)
    if nvcc is None:
        sys.exit("no nvcc: set CUDA_HOME or PATH")
    sources = sorted(path for name in chosen.source for path in (ROOT / "csrc/cuda").glob(f"{name}.cu"))
    spilled: list[str] = []
    print(f"{'kernel':42} {'sm':>4} {'registers':>9} {'shared':>7} {'stack':>6} {'spills':>6}")
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        for source, seconds, kernels in pool.map(lambda s: compile_source(nvcc, s, chosen.arch), sources):
            for use in kernels:
                name = short_name(use.kernel)
                print(f"{name:42} {use.arch:4} {use.registers:9} {use.shared:7} {use.stack:6} {use.spills:6}")
                if use.spills > 0:
                    spilled.append(f"{name} for sm_{use.arch}")
            print(f"# {source.relative_to(ROOT)}: {seconds:.0f} s", flush=True)
    if spilled:
        sys.exit("these kernels spill registers: " + ", ".join(spilled))


if __name__ == "__main__":
    main()
