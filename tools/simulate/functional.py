"""Cases run for their results alone: no cycle is counted, every access is checked."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import NamedTuple

from . import results
from .cases import CASES, Case, differences
from .gpgpusim import Simulator

_gpu: list[Simulator] = []


class Outcome(NamedTuple):
    """Of one case on one backend."""

    verdict: str  # "equal", or what is wrong
    launches: int
    instructions: int  # of threads
    seconds: int


def run_case(number: int, backend: str) -> Outcome:
    """In a process that may die of it: the simulator ends where it cannot go on."""
    case, started = CASES[number], time.monotonic()
    if not _gpu:
        _gpu.append(Simulator())
    if backend == "cuda":
        from .cuda_gpu import load_host, simulated

        load_host()
    else:
        from .triton_gpu import simulated
    try:
        with simulated(_gpu[0]) as runs:
            faults = differences(case, "cuda_host" if backend == "cuda" else backend)
    except Exception as error:
        faults, runs = [f"{type(error).__name__}: {str(error)[:200]}"], []
    verdict = "; ".join(faults) or "equal"
    return Outcome(verdict, len(runs), sum(run.count for run in runs), round(time.monotonic() - started))


def run_cases(chosen: list[Case], backend: str, is_noted: bool) -> bool:
    """Print a line a case and note it; whether all results were right."""
    good, pool = True, None
    for case in chosen:
        pool = pool or ProcessPoolExecutor(1, get_context("spawn"))
        try:
            outcome = pool.submit(run_case, CASES.index(case), backend).result()
        except BrokenProcessPool:
            outcome, pool = Outcome("the simulator aborted", 0, 0, 0), None
        good &= outcome.verdict == "equal"
        if is_noted:
            results.note("functional", backend, f"{case.op} {case.name}", outcome._asdict())
        numbers = (
            f"{outcome.launches:3} launches {outcome.instructions / 1e6:8.2f} M instructions {outcome.seconds:5.0f} s"
        )
        print(f"{backend:7} {case.op + ' ' + case.name:52} {numbers}  {outcome.verdict}", flush=True)
    return good
