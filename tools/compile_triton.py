"""Compile every Triton kernel, as its launcher would, for every GPU we support; no GPU is needed.

The launchers run on CPU tensors with a stand-in for the driver, so what is compiled is exactly what a GPU would get.
Prints registers, spills and shared memory a kernel; exits with 1 if anything spills.

    python tools/compile_triton.py [--target cuda:90] [--case sample]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from torch import Tensor
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


_driver = functools.cache(_Driver)  # one device a target, or its kernels would be compiled again


def _resources(kernel: Any, target: GPUTarget) -> tuple[int, int, int]:
    """(registers, bytes spilled, bytes of shared memory) of a compiled kernel."""
    shared = kernel.metadata.shared
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        found = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
        # Scalar registers spill into lanes of vector registers, which costs no memory; they are not counted.
        return found["vgpr_count"], 4 * found["vgpr_spill_count"], shared
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(kernel.asm["cubin"])
        text = _output(tools / "cuobjdump", "-res-usage", cubin)
        usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
        spilled = 0
        if usage["STACK"] or usage["LOCAL"]:
            # A stack may also belong to a called function; only the assembler says what was spilled.
            ptx.write_text(kernel.asm["ptx"])
            arch = re.search(r"\.target (sm_\w+)", kernel.asm["ptx"])
            assert arch is not None
            ptxas = tools / ("ptxas-blackwell" if target.arch >= 100 else "ptxas")
            ptxas = ptxas if ptxas.exists() else tools / "ptxas"
            text = _output(ptxas, "-v", f"--gpu-name={arch[1]}", "--fmad=false", ptx, "-o", cubin)
            spilled = sum(int(value) for value in re.findall(r"(\d+) bytes spill", text))
    return usage["REG"], spilled, shared


def _output(*command: Any) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


BATCH, DRAFT, VOCAB = 4, 5, 128256
BF16, FP32 = torch.bfloat16, torch.float32
OFF = (None, None, None)
NUMBERS = torch.ones(BATCH)
LONGS = torch.zeros(BATCH, dtype=torch.int64)
INTS = torch.zeros(BATCH, dtype=torch.int32)
FILTERS = (torch.ones(BATCH, dtype=torch.int32), NUMBERS, NUMBERS)
ROWS = torch.zeros(BATCH, DRAFT)
TOKEN_MAP = torch.zeros(VOCAB, dtype=torch.int32)


def _logits(dtype: torch.dtype, *shape: int) -> Tensor:
    """No memory is touched; a stride of 0 allows 16-byte loads, as that of a dense tensor of such a width."""
    return torch.zeros((), dtype=dtype).expand(*shape, VOCAB)


def _bits(rows: int) -> Tensor:
    return torch.zeros(rows, VOCAB // 32, dtype=torch.int32)


def _verify_chain(
    rule: int, dtype: torch.dtype, filters: Any, drafts: bool, stats: bool, mask: bool, mode: int
) -> None:
    from specdec_kernels.ops.verify_chain.triton_kernel import verify_chain_out

    verify_chain_out(
        torch.zeros(BATCH, DRAFT, dtype=torch.int64), _logits(dtype, BATCH, DRAFT + 1),
        _logits(dtype, BATCH, DRAFT) if drafts else None, ROWS if stats else None, ROWS if stats else None, None,
        DRAFT, NUMBERS, *filters, NUMBERS, *filters, LONGS, LONGS, LONGS, rule, 0.0, False, None,
        _bits(BATCH * (DRAFT + 1)) if mask else None, 0.3, 0.3, 3, 1, 1, mode,
        torch.zeros(BATCH, DRAFT + 1, dtype=torch.int64), INTS, INTS, torch.zeros(BATCH, DRAFT + 1),
    )  # fmt: skip


def _sample(dtype: torch.dtype, filters: Any, count: int, mapped: bool, mode: int) -> None:
    from specdec_kernels.ops.sample.triton_kernel import sample_out

    sample_out(
        _logits(dtype, BATCH), NUMBERS, *filters, LONGS, LONGS, LONGS, 3, count, LONGS, None,
        TOKEN_MAP if mapped else None, _bits(BATCH) if mapped else None, mode,
        torch.zeros(BATCH, count, dtype=torch.int64), torch.zeros(BATCH, count), NUMBERS, NUMBERS, INTS,
    )  # fmt: skip


def _acceptance_ratios(dtype: torch.dtype, filters: Any) -> None:
    from specdec_kernels.ops.acceptance_ratios.triton_kernel import acceptance_ratios_out

    acceptance_ratios_out(
        torch.zeros(BATCH, DRAFT, dtype=torch.int64), _logits(dtype, BATCH, DRAFT + 1), _logits(dtype, BATCH, DRAFT),
        None, DRAFT, NUMBERS, *filters, NUMBERS, *filters, None, None, ROWS, ROWS, INTS,
    )  # fmt: skip


def _residual(op: str, dtype: torch.dtype, filters: Any, mapped: bool) -> None:
    module = importlib.import_module(f"specdec_kernels.ops.{op}.triton_kernel")
    common = (
        _logits(dtype, BATCH), _logits(dtype, BATCH), NUMBERS, NUMBERS, NUMBERS, *filters, NUMBERS, *filters,
        TOKEN_MAP if mapped else None, None, LONGS,
    )  # fmt: skip
    if op == "residual_probs":
        module.residual_probs_out(*common, torch.zeros(BATCH, VOCAB), NUMBERS, INTS)
    else:
        module.residual_sample_out(*common, LONGS, LONGS, LONGS, 2, LONGS, NUMBERS, INTS)


def _cache(op: str, paged: bool, *more: Any, dims: tuple[int, ...] = (256,)) -> None:
    module = importlib.import_module(f"specdec_kernels.ops.{op}.triton_kernel")
    views = [torch.zeros(BATCH, 16, 8, dim, dtype=torch.uint8) for dim in dims * 2]
    table = torch.zeros(BATCH, 4, dtype=torch.int32) if paged else None
    getattr(module, f"{op}_out")(views, torch.zeros(len(views), 5, dtype=torch.int64), table, 16, BATCH, *more)


def _path(columns: int) -> Tensor:
    return LONGS.repeat(columns, 1).T.contiguous()


def _gather_nodes() -> None:
    from specdec_kernels.ops.gather_nodes.triton_kernel import gather_nodes_out

    values = torch.zeros(BATCH, DRAFT, 8192, dtype=torch.uint8)
    gather_nodes_out(values, torch.zeros(BATCH, DRAFT, dtype=torch.int64), values, INTS)


NODES, SMALL = 1024, 64
TREE = torch.zeros(BATCH, NODES, dtype=torch.int32)
NODE_IDS = torch.zeros(BATCH, NODES, dtype=torch.int64)


def _tree_layout(nodes: int) -> None:
    from specdec_kernels.ops.tree_layout.triton_kernel import tree_layout_out

    tree, longs = TREE[:, :nodes], NODE_IDS[:, :nodes]
    words = torch.zeros(BATCH, nodes, nodes // 32, dtype=torch.int32)
    tree_layout_out(tree, LONGS, 31, nodes, tree, longs, tree, tree, words, words, INTS)


def _tree_mask(format: int, dtype: torch.dtype, *shape: int) -> None:
    from specdec_kernels.ops.tree_mask.triton_kernel import tree_mask_out

    mask = torch.zeros(shape, dtype=dtype)
    tree_mask_out(TREE, LONGS, LONGS, 7, shape[-1], format, dtype, mask, torch.zeros(BATCH + 1).long(), INTS)


def _tree_attention(dtype: torch.dtype, nodes: int, dims: tuple[int, int], paged: bool) -> None:
    from specdec_kernels.ops.tree_attention.triton_kernel import tree_attention_out

    key, value = (torch.zeros(BATCH, 16, 8, dim, dtype=dtype) for dim in dims)
    query, output = (torch.zeros(BATCH, nodes, 32, dim, dtype=dtype) for dim in dims)
    tree_attention_out(
        query, key, value, torch.zeros(BATCH, nodes, -(-nodes // 32), dtype=torch.int32), LONGS,
        torch.zeros(BATCH, 64, dtype=torch.int32) if paged else None, 0.1, 7 if paged else 0,
        output, torch.zeros(BATCH, nodes, 32), INTS,
    )  # fmt: skip


def _select_tree(nodes: int) -> None:
    from specdec_kernels.ops.select_tree.triton_kernel import select_tree_out

    ids, tree = NODE_IDS[:, :nodes], TREE[:, :nodes]
    select_tree_out(ids, tree, torch.zeros(BATCH, nodes, dtype=BF16), nodes // 2, ids, tree, tree, INTS)


def _tree_from_sequences() -> None:
    from specdec_kernels.ops.tree_from_sequences.triton_kernel import tree_from_sequences_out

    sequences = torch.zeros(BATCH, 30, 7, dtype=torch.int64)
    tree_from_sequences_out(sequences, NODES, NODE_IDS, TREE, TREE, INTS)


def _verify_tree(rule: int, dtype: torch.dtype, filters: Any, drafts: bool, nodes: int = 64, mode: int = 0) -> None:
    from specdec_kernels.ops.verify_tree.triton_kernel import verify_tree_out

    ids, path = NODE_IDS[:, :nodes].contiguous(), torch.zeros(BATCH, 2, dtype=torch.int64)
    verify_tree_out(
        ids, ids.int(), _logits(dtype, BATCH, nodes), _logits(dtype, BATCH, nodes) if drafts else None, 1,
        NUMBERS, *filters, NUMBERS, *filters, LONGS, LONGS, LONGS, rule, False, None, None, 0.3, 0.3, mode,
        path, path, INTS, INTS, torch.zeros(BATCH, 2),
    )  # fmt: skip


# What the launchers are asked for: each kernel bare, and with everything that costs registers.
CASES: dict[str, Callable[[], None]] = {
    "verify_chain ratio bf16": lambda: _verify_chain(0, BF16, OFF, True, False, False, 0),
    "verify_chain ratio bf16 filters": lambda: _verify_chain(0, BF16, FILTERS, True, False, False, 1),
    "verify_chain ratio fp32 stats filters": lambda: _verify_chain(0, FP32, FILTERS, True, True, True, 2),
    "verify_chain block bf16 filters": lambda: _verify_chain(1, BF16, FILTERS, True, False, False, 0),
    "verify_chain match bf16": lambda: _verify_chain(2, BF16, OFF, False, False, False, 0),
    "verify_chain match bf16 filters": lambda: _verify_chain(2, BF16, FILTERS, False, False, False, 1),
    "verify_chain greedy bf16": lambda: _verify_chain(3, BF16, OFF, False, False, False, 0),
    "verify_chain typical fp32 filters": lambda: _verify_chain(4, FP32, FILTERS, False, False, True, 0),
    "verify_chain topm fp32": lambda: _verify_chain(5, FP32, OFF, False, False, False, 1),
    "sample bf16": lambda: _sample(BF16, OFF, 1, False, 1),
    "sample bf16 filters": lambda: _sample(BF16, FILTERS, 1, False, 1),
    "sample fp32 filters map 8 raw": lambda: _sample(FP32, FILTERS, 8, True, 2),
    "acceptance_ratios bf16 filters": lambda: _acceptance_ratios(BF16, FILTERS),
    "residual_probs bf16": lambda: _residual("residual_probs", BF16, OFF, False),
    "compact_cache": lambda: _cache("compact_cache", False, _path(6), INTS, LONGS, INTS),
    "compact_cache paged": lambda: _cache("compact_cache", True, _path(6), INTS, LONGS, INTS),
    "compact_cache long path, any dims": lambda: _cache(
        "compact_cache", False, _path(30), INTS, LONGS, INTS, dims=(256, 128)
    ),
    "select_state": lambda: _cache("select_state", False, INTS, INTS),
    "rollback paged zero": lambda: _cache("rollback", True, LONGS, INTS, 64, LONGS, INTS.repeat(4), INTS, INTS),
    "gather_nodes": _gather_nodes,
    "tree_layout 64": lambda: _tree_layout(SMALL),
    "tree_layout 1024": lambda: _tree_layout(NODES),
    "select_tree 64": lambda: _select_tree(SMALL),
    "select_tree 1024": lambda: _select_tree(NODES),
    "tree_from_sequences": _tree_from_sequences,
    "verify_tree match bf16": lambda: _verify_tree(0, BF16, OFF, False),
    "verify_tree greedy fp32 1024": lambda: _verify_tree(1, FP32, OFF, False, NODES),
    "verify_tree typical bf16": lambda: _verify_tree(2, BF16, OFF, False),
    "verify_tree recursive bf16 filters": lambda: _verify_tree(3, BF16, FILTERS, True, mode=1),
    "verify_tree greedy_multi_draft bf16": lambda: _verify_tree(4, BF16, OFF, True),
    "verify_tree target_only bf16 1024": lambda: _verify_tree(5, BF16, OFF, False, NODES),
    "verify_tree traversal fp32": lambda: _verify_tree(6, FP32, OFF, True),
    "tree_mask bool": lambda: _tree_mask(0, torch.bool, BATCH, 1, NODES, NODES),
    "tree_mask additive bf16": lambda: _tree_mask(1, BF16, BATCH, 1, NODES, NODES),
    "tree_mask flat": lambda: _tree_mask(2, torch.bool, BATCH * NODES * NODES),
    "tree_mask flat packed": lambda: _tree_mask(3, torch.uint8, BATCH * NODES * NODES // 8),
    "tree_mask int64": lambda: _tree_mask(5, torch.int64, BATCH, NODES, NODES // 64),
    "tree_attention bf16 paged": lambda: _tree_attention(BF16, SMALL, (128, 128), True),
    "tree_attention bf16 dense": lambda: _tree_attention(BF16, SMALL, (128, 128), False),
    "tree_attention bf16 1024 nodes, widest": lambda: _tree_attention(BF16, NODES, (256, 256), True),
    "tree_attention fp32 paged": lambda: _tree_attention(FP32, SMALL, (128, 128), True),
    "tree_attention fp32 1024 nodes, widest": lambda: _tree_attention(FP32, NODES, (256, 256), True),
    "residual_sample bf16 filters map": lambda: _residual("residual_sample", BF16, FILTERS, True),
}


def _compile(work: tuple[str, str]) -> list[tuple[str, str, int]]:
    """(hash, line to print, bytes spilled) of every kernel that a case launches on a target."""
    name, case = work
    target, found = TARGETS[name], []
    driver.set_active(_driver(target))

    def compile_only(kernel: Any, programs: int, *args: Any, **meta: Any) -> None:
        compiled = kernel.warmup(*args, grid=(1,), **{"num_warps": host.NUM_WARPS, **host.OPTIONS, **meta})
        registers, spills, shared = _resources(compiled, target)
        numbers = f"{registers:4} registers {spills:5} spilled {shared:6} shared"
        line = f"{name:10} {case:38} {compiled.name:18} {numbers}{'  SPILL' if spills else ''}"
        found.append((compiled.hash, line, spills))

    host.launch = compile_only
    CASES[case]()
    return found


def main() -> int:
    """Compile every case for every target, on every core."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--case", help="only cases whose name contains this", default="")
    options = parser.parse_args()
    started = time.perf_counter()
    spilled = 0
    seen: set[str] = set()
    work = [(name, case) for name in options.target or TARGETS for case in CASES if options.case in case]
    # Processes, for tracing and the passes hold the interpreter; started afresh, for torch's threads survive no fork.
    with multiprocessing.get_context("spawn").Pool() as pool:
        for kernels in pool.imap(_compile, work):
            for kernel, line, spills in kernels:
                if kernel not in seen:
                    seen.add(kernel)
                    spilled += spills > 0
                    print(line, flush=True)
    print(f"{len(seen)} kernels, {spilled} with spills, {time.perf_counter() - started:.0f} s")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
