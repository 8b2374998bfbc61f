"""Times contenders against each other: one call of each in turn, so that all see the same machine.

A call starts on inputs it has not seen since at least one other contender ran (rows walk through several batches), as
in decoding, where the logits were written a moment ago and half of them are no longer in a cache.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .cases import Measured

MIN_RUNS, MAX_RUNS, SLOW_RUNS = 9, 101, 4
SLOW = 0.5  # seconds; a contender that slow runs SLOW_RUNS times


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleave(
    contenders: Mapping[str, Callable[[Any], Any]], inputs: Sequence[Any], *, seconds: float
) -> dict[str, Measured]:
    """Median, 20th and 80th percentile of each contender; rounds go on for about `seconds`."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run(inputs[0])
    gc.collect()
    gc.disable()
    try:
        started, turn = time.perf_counter(), 0
        while turn < MIN_RUNS or (turn < MAX_RUNS and time.perf_counter() - started < seconds):
            for place, (name, run) in enumerate(contenders.items()):
                if len(times[name]) >= SLOW_RUNS and statistics.median(times[name]) > SLOW:
                    continue
                synchronize()
                begin = time.perf_counter_ns()
                run(inputs[(turn + place) % len(inputs)])  # not what the one before just read
                synchronize()
                times[name].append((time.perf_counter_ns() - begin) * 1e-9)
            turn += 1
    finally:
        gc.enable()
    return {name: summary(values) for name, values in times.items()}


def summary(seconds: Sequence[float]) -> Measured:
    """Seconds to a row of microseconds."""
    ordered = sorted(x * 1e6 for x in seconds)

    def at(fraction: float) -> float:
        return ordered[min(len(ordered) - 1, round(fraction * (len(ordered) - 1)))]

    return Measured(round(statistics.median(ordered), 1), round(at(0.2), 1), round(at(0.8), 1), len(ordered))
