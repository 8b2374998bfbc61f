"""Time of a call from the counts of its kernels.

A kernel takes the longest of: its bytes at the copy rate; its issue slots at EFFICIENCY of what the fullest
multiprocessor issues; its waves of blocks, each as long as one block takes alone. Then a ramp, and the merge behind its
last ticket. A call is the sum of its kernels, 2 us for the first launch and 1 us for each that follows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .count import Counts
from .machines import ISSUE, Machine, issue_slots, resident_blocks

EFFICIENCY = 0.7  # of the issue slots that good streaming code uses
MEMORY = 0.7e-6  # s from a load that misses every cache to its use, in a busy memory system
CACHED = 0.3e-6  # s where the load hits the second-level cache: parameters, partial results
DEPENDENT = 3  # clocks an instruction of one warp alone: latencies are 4 to 6, neighbours overlap
BARRIER = 30  # clocks
LOOK_TURNS = 2  # one finds the winner, one that nothing beats it; rows of many likely ids take 3 to 5
FIRST_LAUNCH, NEXT_LAUNCH = 2e-6, 1e-6
ROW_BYTES = {"bf16": 2, "fp32": 4}


class Kernel(NamedTuple):
    """A kernel as the model needs it."""

    name: str
    arch: int
    threads: int
    registers: int
    shared: int
    spilled: int
    counts: Counts

    @property
    def resident(self) -> int:
        """Blocks on a multiprocessor."""
        return resident_blocks(self.arch, self.registers, self.shared, self.threads)

    @property
    def in_flight(self) -> int:
        """Bytes that a multiprocessor has asked for before it needs the first."""
        return self.resident * self.threads * max((s.in_flight for s in self.counts.streams), default=0)

    def per_element(self, size: int) -> tuple[float, float]:
        """(instructions, issue slots) for each element of `size` bytes that is streamed; nan where nothing is."""
        read = sum(s.read for s in self.counts.streams) / size
        if not read:
            return math.nan, math.nan
        streams = self.counts.streams
        slots = sum(issue_slots(self.arch, s.work.issued, s.work.units) for s in streams)
        return sum(s.work.issued for s in streams) / read, slots / read


class Launch(NamedTuple):
    """A kernel with a grid. `streamed`: bytes that it reads in all, where its loops do not tell."""

    kernel: Kernel
    blocks: int
    streamed: int = 0
    is_idle: bool = False
    looks: bool = False  # into a few blocks of its rows: each of its loops takes LOOK_TURNS


class Time(NamedTuple):
    """Seconds of a kernel and what they go to."""

    bytes: float
    issue: float
    latency: float
    ramp: float
    merge: float

    @property
    def total(self) -> float:
        """Of the kernel, without its launch."""
        return max(self.bytes, self.issue, self.latency) + self.ramp + self.merge

    @property
    def bound(self) -> str:
        """The term that decides."""
        terms = {"bytes": self.bytes, "instructions": self.issue, "latency": self.latency, "merge": self.merge}
        return max(terms, key=lambda name: terms[name])


def kernel_time(machine: Machine, launch: Launch) -> Time:
    """Of one launch on a machine."""
    kernel, blocks = launch.kernel, max(launch.blocks, 1)
    resident = max(kernel.resident, 1)
    clock, processors = machine.clock, machine.processors
    once, after = kernel.counts.once, kernel.counts.after
    slots = issue_slots(kernel.arch, once.issued, once.units)
    alone = once.waits * CACHED + (once.serial * DEPENDENT + once.barriers * BARRIER) / clock
    moved = 0.0
    for stream in kernel.counts.streams:
        turns, looks = 1.0, launch.looks and stream.loops
        if looks and not launch.is_idle:
            turns = LOOK_TURNS
        elif stream.loops or launch.is_idle:
            turns = launch.streamed / max(blocks * kernel.threads * stream.read, 1)
        moved += turns * blocks * kernel.threads * (stream.read + stream.written)
        slots += turns * issue_slots(kernel.arch, stream.work.issued, stream.work.units)
        rounds = turns if looks else turns * stream.read / max(stream.in_flight, 1)
        serial = (stream.work.serial * DEPENDENT + stream.work.barriers * BARRIER) / clock
        # A straight piece holds the block's set-up: all but one of its waits are for parameters, not for rows.
        other = max(stream.work.waits - math.ceil(stream.read / max(stream.in_flight, 1)), 0) * CACHED
        alone += rounds * MEMORY + turns * serial + (0 if stream.loops else turns * other)
    if launch.is_idle:
        alone += 2 * CACHED
    fullest = math.ceil(blocks / processors)
    waves = math.ceil(blocks / (processors * resident))
    return Time(
        moved / machine.copy,
        fullest * kernel.threads * slots / (ISSUE * EFFICIENCY * clock),
        waves * alone,
        MEMORY,
        after.waits * CACHED + (after.serial * DEPENDENT + after.barriers * BARRIER) / clock,
    )


def call_time(machine: Machine, launches: list[Launch]) -> float:
    """Seconds of a call."""
    started = FIRST_LAUNCH + NEXT_LAUNCH * (len(launches) - 1)
    return started + sum(kernel_time(machine, one).total for one in launches)


def share(machine: Machine, launches: list[Launch], least: float) -> float:
    """Part of the copy rate at which the bytes that the call must read are read."""
    return least / machine.copy / call_time(machine, launches)
