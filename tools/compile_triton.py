"""Compile every Triton kernel, as its launcher would, for every GPU we support; no GPU is needed.

The launchers run on CPU tensors with a stand-in for the driver, so what is compiled is exactly what a GPU would get.
Prints registers, spills and shared memory a kernel; exits with 1 if anything spills.

    python tools/compile_triton.py [--target cuda:90] [--op sample]
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from specdec_kernels._triton import launch as host

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


def _ptxas() -> str:
    from triton.backends.nvidia import compiler

    return str(compiler.get_ptxas(100).path if hasattr(compiler, "get_ptxas") else "ptxas")


def _resources(kernel: Any, target: GPUTarget) -> tuple[int, int, int]:
    """(registers, bytes spilled, bytes of shared memory) of a compiled kernel."""
    shared = kernel.metadata.shared
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        found = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", text)}
        return found["vgpr_count"], 4 * (found["vgpr_spill_count"] + found["sgpr_spill_count"]), shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([str(tool), "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"]), shared


def _verify_chain() -> Iterator[tuple[str, Callable[[], None]]]:
    from specdec_kernels.ops.verify_chain.triton_kernel import verify_chain_out

    batch, draft, vocab = 4, 5, 128256
    ids = torch.zeros(batch, draft, dtype=torch.int64)
    noise = torch.zeros(batch, dtype=torch.int64)
    numbers = torch.ones(batch)
    bits = torch.zeros(batch * (draft + 1), vocab // 32, dtype=torch.int32)
    filters = (torch.ones(batch, dtype=torch.int32), numbers, numbers)
    off = (None, None, None)
    stat = torch.zeros(batch, draft)

    def case(rule: int, dtype: torch.dtype, some: Any, drafts: bool, stats: bool, mask: bool, mode: int) -> None:
        target = torch.zeros((), dtype=dtype).expand(batch, draft + 1, vocab)
        logits = torch.zeros((), dtype=dtype).expand(batch, draft, vocab) if drafts else None
        verify_chain_out(
            ids, target, logits, stat if stats else None, stat if stats else None, None, draft,
            numbers, *some, numbers, *some, noise, noise, noise, rule, 0.0, False, None, bits if mask else None,
            0.3, 0.3, 3, 1, 1, mode, ids.new_zeros(batch, draft + 1), torch.zeros(batch, dtype=torch.int32),
            torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, draft + 1),
        )  # fmt: skip

    bf16, fp32 = torch.bfloat16, torch.float32
    for name, arguments in {
        "ratio bf16": (0, bf16, off, True, False, False, 0),
        "ratio bf16 filters": (0, bf16, filters, True, False, False, 1),
        "ratio fp32 stats filters allowed": (0, fp32, filters, True, True, True, 2),
        "block bf16 filters": (1, bf16, filters, True, False, False, 0),
        "match bf16": (2, bf16, off, False, False, False, 0),
        "match bf16 filters": (2, bf16, filters, False, False, False, 1),
        "greedy bf16": (3, bf16, off, False, False, False, 0),
        "typical bf16 filters": (4, bf16, filters, False, False, False, 0),
        "topm fp32": (5, fp32, off, False, False, False, 1),
    }.items():
        yield name, lambda arguments=arguments: case(*arguments)


OPS = {"verify_chain": _verify_chain}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--op", choices=OPS, action="append")
    options = parser.parse_args()
    spilled = 0
    seen: set[tuple[str, str]] = set()
    current: list[Any] = []

    def compile_only(kernel: Any, programs: int, *args: Any, **meta: Any) -> None:
        del programs
        name, case, target = current
        compiled = kernel.warmup(*args, grid=(1,), **{"num_warps": host.NUM_WARPS, **host.OPTIONS, **meta})
        if (name, compiled.hash) in seen:
            return
        seen.add((name, compiled.hash))
        registers, spills, shared = _resources(compiled, target)
        nonlocal spilled
        spilled += spills > 0
        mark = "  SPILL" if spills else ""
        print(f"{name:10} {case:34} {compiled.name:18} {registers:4} regs {spills:6} spilled {shared:6} shared{mark}", flush=True)

    host.launch = compile_only
    for name in options.target or TARGETS:
        target = TARGETS[name]
        driver.set_active(_Driver(target))
        for op in options.op or OPS:
            for case, run in OPS[op]():
                current[:] = [name, f"{op} {case}", target]
                run()
    print(f"{len(seen)} kernels, {spilled} with spills")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
