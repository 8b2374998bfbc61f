"""Times on a GPU: CUDA graphs that walk through inputs larger than L2, and the two ceilings, copy and Philox."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .timing import summary

REPLAYS = 25
COPY_BYTES = 1 << 30
PHILOX_BLOCKS = 1 << 24


def l2_bytes() -> int:
    """Level 2 cache of the device."""
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 50 << 20))


def graph_of(run: Callable[[Any], Any], inputs: Sequence[Any]) -> torch.cuda.CUDAGraph:
    """One replay calls `run` once on each input."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in inputs[:2]:
            run(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            run(x)
    return graph


def times(go: Callable[[], None], calls: int) -> list[float]:
    """Seconds of one call, from REPLAYS timings of `go`, which makes `calls` calls."""
    for _ in range(3):
        go()
    found = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        go()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3 / calls)
    return found


def clock(run: Callable[[Any], Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """Replayed and launched time of a call on inputs that are cold in L2 (the inputs together exceed it)."""
    row: dict[str, Any] = {}

    def launch_all() -> None:
        for x in inputs:
            run(x)

    try:
        graph = graph_of(run, inputs)
    except Exception as error:
        torch.cuda.synchronize()
        row["graph"] = f"cannot be captured: {str(error).splitlines()[0][:120]}"
    else:
        p50, p20, p80, runs = summary(times(graph.replay, len(inputs)))
        row |= {"p50_us": p50, "p20_us": p20, "p80_us": p80, "runs": runs}
    launched = summary(times(launch_all, len(inputs)))
    row["launched_p50_us"] = launched.p50
    if "p50_us" not in row:
        row |= {"p50_us": launched.p50, "p20_us": launched.p20, "p80_us": launched.p80, "runs": launched.runs}
    return row


def copy_bandwidth() -> float:
    """Bytes a second of a device copy, read and written both counted."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / statistics.median(times(lambda: target.copy_(source), 1))


@triton.jit
def _philox_kernel(out_ptr, BLOCK: tl.constexpr):
    # out[program] = largest word of BLOCK Philox blocks: the random numbers of 4 BLOCK ids, and no memory.
    program = tl.program_id(0)
    block = (program * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    zero = block * 0
    a, b, c, d = tl.philox(1234, block, zero, zero, zero)
    best = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    tl.store(out_ptr + program, tl.max(best.to(tl.int64), axis=0))


def philox_words() -> float:
    """Words a second of a kernel that makes Philox words and does nothing else."""
    block = 1024
    programs = PHILOX_BLOCKS // block
    out = torch.empty(programs, dtype=torch.int64, device="cuda")
    return 4 * PHILOX_BLOCKS / statistics.median(times(lambda: _philox_kernel[(programs,)](out, BLOCK=block), 1))
