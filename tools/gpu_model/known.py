"""Two kernels whose speed others have published, compiled and predicted like ours: what the model is worth.

The softmax is the persistent one of Triton's tutorial 02 (4096 float32 rows); its published tables do not name their
GPU, the plateaus are those of an A100 with 40 GB and of an H100 SXM. The copy is what the model calls copy rate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from .machines import A100, H100, Machine
from .model import Launch, call_time

ROWS = 4096
SMALL_A100 = A100._replace(name="A100 40 GB", copy=1.45e12)
# GB/s by columns, read from the printed tables.
SOFTMAX: dict[Machine, dict[int, float]] = {
    SMALL_A100: {1024: 994, 2048: 1281, 4096: 1396, 6144: 1406, 8192: 1442, 11264: 1431},
    H100: {1024: 1794, 2048: 2292, 4096: 2577, 6144: 2852, 8192: 2853, 11264: 2190},
}


@triton.jit
def copy_kernel(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


@triton.jit
def softmax_kernel(
    output, source, source_stride, output_stride, rows, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    step = tl.num_programs(0)
    for row in tl.range(tl.program_id(0), rows, step, num_stages=STAGES):
        column = tl.arange(0, BLOCK)
        x = tl.load(source + row * source_stride + column, mask=column < columns, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(output + row * output_stride + column, e / tl.sum(e, axis=0), mask=column < columns)


def _copy(n: int) -> None:
    x = torch.empty(n, dtype=torch.int32)
    copy_kernel[(triton.cdiv(n, 8192),)](x, x, n, BLOCK=8192, num_warps=8)


def _softmax(columns: int, stages: int) -> None:
    x = torch.empty(ROWS, columns)
    softmax_kernel[(ROWS,)](
        x, x, columns, columns, ROWS, columns, BLOCK=triton.next_power_of_2(columns), STAGES=stages, num_warps=8
    )  # fmt: skip


def run(content: dict[str, Any]) -> None:
    """Compile them."""
    from .collect import triton_kernel
    from .triton_run import run as launches

    def one(arch: int, call: Callable[[], None]) -> list[Any]:
        (made,) = launches(f"cuda:{arch}", call)
        return triton_kernel(made.compiled, f"cuda:{arch}", made.threads)

    content["known"] = {
        "copy": {str(arch): one(arch, partial(_copy, 1 << 28)) for arch in (80, 90)},
        **{
            f"softmax {machine.name}": {
                str(columns): one(machine.arch, partial(_softmax, columns, 4 if machine.arch == 90 else 2))
                for columns in published
            }
            for machine, published in SOFTMAX.items()
        },
    }


def predicted(content: dict[str, Any]) -> list[tuple[str, int, float, float]]:
    """(kernel and machine, columns, published GB/s, predicted GB/s)."""
    from .collect import from_json

    found = []
    for machine, published in SOFTMAX.items():
        for columns, rate in published.items():
            kernel = from_json(content["known"][f"softmax {machine.name}"][str(columns)])
            moved = ROWS * columns * 4
            blocks = min(ROWS, machine.processors * max(kernel.resident, 1))
            seconds = call_time(machine, [Launch(kernel, blocks, moved)])
            found.append((f"softmax, {machine.name}", columns, rate, 2 * moved / seconds / 1e9))
    return found


def errors(content: dict[str, Any]) -> list[float]:
    """predicted / published - 1 of each."""
    return [ours / theirs - 1 for _, _, theirs, ours in predicted(content)]
