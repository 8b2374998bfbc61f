"""Times on a GPU: CUDA graphs that walk through inputs larger than L2, launched calls, and the two ceilings.

A call is captured unless it waits for the device, which a graph cannot hold. A row says which of the two its `p50_us`
is: "timed": "replay" or "launches", and "graph" why nothing was captured. Launches are timed beside every replay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .timing import summary

REPLAYS, FEWEST = 25, 5
BUDGET = 0.4  # seconds of a series of replays or launches: slow contenders run less often
SERIES, SHORT = 20, 2e-3  # calls of a series at least, where one takes less: a graph of two calls times its own launch
COPY_BYTES = 1 << 30
PHILOX_BLOCKS = 1 << 24


def l2_bytes() -> int:
    """Level 2 cache of the device."""
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 50 << 20))


def words_of(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def why_not_captured(run: Callable[[Any], Any], x: Any) -> str:
    """What of a call a graph cannot hold: it waits for the device; "" if it does not."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x)
    except RuntimeError as error:
        return f"reads values on the host ({words_of(error)})"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return ""


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
    # A capture that fails leaves its stream behind as the current one; the outer block puts the old one back.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        for x in inputs:
            run(x)
    return graph


def times(go: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of one call, from timings of `go`, which makes `calls` calls."""
    go()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    go()
    torch.cuda.synchronize()
    once = time.perf_counter() - begun
    found = []
    for _ in range(min(REPLAYS, max(FEWEST, int(BUDGET / max(once, 1e-6))))):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        go()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3 / calls)
    return found


def series(run: Callable[[Any], Any], inputs: Sequence[Any]) -> list[Any]:
    """The inputs, again and again until the launch of a graph is a small share of it."""
    run(inputs[0])
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run(inputs[0])
    torch.cuda.synchronize()
    is_short = time.perf_counter() - begun < SHORT
    return list(inputs) * (-(-SERIES // len(inputs)) if is_short else 1)


def clock(run: Callable[[Any], Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """Times of a call on inputs that are cold in L2 (the inputs together exceed it)."""
    inputs = series(run, inputs)

    def launch_all() -> None:
        for x in inputs:
            run(x)

    launched = summary(times(launch_all, len(inputs)))
    best, row = launched, {"timed": "launches", "launched_p50_us": launched.p50}
    reason = why_not_captured(run, inputs[0])
    if not reason:
        try:
            graph = graph_of(run, inputs)
            torch.cuda.synchronize()
            best, row["timed"] = summary(times(graph.replay, len(inputs))), "replay"
        except Exception as error:  # whatever the rival's call cannot do in a graph
            torch.cuda.synchronize()
            reason = f"the capture failed ({words_of(error)})"
    if reason:
        row["graph"] = reason
    return row | {"p50_us": best.p50, "p20_us": best.p20, "p80_us": best.p80, "runs": best.runs}


def kernel_times(run: Callable[[Any], Any], inputs: Sequence[Any]) -> list[list[Any]] | str:
    """[kernel, microseconds a call, launches a call] of a call's kernels, or why the profiler did not tell."""
    some = inputs[:4]
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for x in some:
                run(x)
            torch.cuda.synchronize()
        events = [e for e in profile.key_averages() if e.self_device_time_total > 0]
    except Exception as error:  # no figure is worth the run
        return words_of(error)
    found = [[e.key[:80], round(e.self_device_time_total / len(some), 2), e.count / len(some)] for e in events]
    return sorted(found, key=lambda kernel: -kernel[1])


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
