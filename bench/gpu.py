"""python -m bench.gpu --file F: what bench/gpu.sh measures. Figures of a GPU come only from here.

A call reads rows that are cold in L2 (a graph walks through inputs whose bytes exceed it twice). A row tells the median
of graph replays, or of launches where a call cannot be captured ("timed"), the bytes that the rule must read (MIN) a
second, their share of the measured copy bandwidth, and the time of each kernel. Under rule match also the share of the
slower floor, copy or Philox words. Every row is written as it comes, the most telling first.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from specdec_kernels._op import OPS

from . import results, suite
from .cases import Case
from .gpu_clock import clock, copy_bandwidth, kernel_times, l2_bytes, philox_words, words_of
from .gpu_plan import cases
from .json_rows import read, write
from .machine import commit, machine, progress, slug, versions
from .minimum import minimum
from .rows import ChainInput

MAX_INPUTS = 64
KEY = ("op", "case", "contender")
EMPTY: dict[str, Any] = {"ceilings": {}, "steps": [], "counters": [], "rows": []}


def cold(case: Any, made: list[Any]) -> list[Any]:
    """Copies of the inputs until what a walk through them reads is twice the L2 cache; trees exceed it as they are."""
    if not isinstance(made[0], ChainInput):
        return made
    count = min(MAX_INPUTS, max(2, -(-2 * l2_bytes() // minimum(case, made[0], stats=True))))
    given = len(made)
    while len(made) < count:
        x = made[len(made) % given]
        made.append(x._replace(target=x.target.clone(), draft=x.draft.clone()))
    return made


def shares(case: Case, row: dict[str, Any], x: ChainInput, copy: float, philox: float) -> dict[str, Any]:
    """MIN, bytes a second, and the share of the ceilings."""
    seconds = row["p50_us"] * 1e-6
    least = minimum(case, x, "draft_stats" in row["contender"])
    found = {"min_bytes": least, "gb_per_s": round(least / seconds / 1e9, 1)}
    found["of_copy"] = round(least / copy / seconds, 3)
    if case.rule == "match":
        words = x.target.numel()
        found["of_slower_floor"] = round(max(least / copy, words / philox) / seconds, 3)
    return found


def measure_one(case: Any, contender: suite.Contender, made: list[Any], ceilings: tuple[float, float]) -> Any:
    """The row of one contender: checked, then timed."""
    row: dict[str, Any] = {"contender": contender.name, "is_ours": contender.is_ours}
    begun = time.perf_counter()
    try:
        contender.check(made[0])
        row["first_call_s"] = round(time.perf_counter() - begun, 2)  # kernels compiled, and the check
        row |= clock(contender.run, made)
    except Exception as error:  # wrong, or it cannot run here: the row says so
        progress(f"  {contender.name} is left out: {words_of(error)}")
        return row | {"left_out": words_of(error)}
    if contender.is_ours:
        row["kernels"] = kernel_times(contender.run, made)
        if isinstance(case, Case):
            row |= shares(case, row, made[0], *ceilings)
    share = f"   {row['of_copy']:.0%} of copy" if "of_copy" in row else ""
    note = f"   {row['graph']}" if "graph" in row else ""
    print(
        f"  {contender.name:<28}{row['p50_us']:>10.1f} us   launched {row['launched_p50_us']:>10.1f}{share}{note}",
        flush=True,
    )
    return row


def attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """(result, "") or (None, why there is none): what fails leaves the rest of the run alone."""
    try:
        return make(), ""
    except Exception as error:  # no memory, no compiler for Triton
        progress(f"  left out: {words_of(error)}")
        return None, words_of(error)


def measure(case: Any, backends: list[str], ceilings: tuple[float, float]) -> Iterator[dict[str, Any]]:
    """Rows of one case, ours first; a rival that is only launched is compared with our launches."""
    facts = {k: v for k, v in dataclasses.asdict(case).items() if k not in ("op", "compiled", "threads")}
    facts = {"op": case.op, "case": case.name, "threads": 0, **facts}
    made, fault = attempt(lambda: cold(case, suite.module(case.op).inputs(case)))
    if fault:
        yield facts | {"contender": "inputs", "is_ours": False, "left_out": fault}
        return
    declared = OPS[case.op].backends if case.op in OPS else backends
    ours: dict[str, Any] | None = None
    for contender in suite.contenders(case, made, [b for b in backends if b in declared]):
        row = measure_one(case, contender, made, ceilings)
        if "p50_us" in row:
            ours = ours or (row if row["is_ours"] else None)
            if ours:
                same = "p50_us" if row["timed"] == ours["timed"] else "launched_p50_us"
                row["times_ours"] = round(row[same] / ours[same], 3)
        yield facts | row


def driver() -> str:
    """Version of the GPU's driver."""
    query = "timeout 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    found = subprocess.run(query, shell=True, capture_output=True, text=True).stdout.split()
    return found[0] if found else "unknown"


def header() -> dict[str, Any]:
    """What a figure of this GPU has to be read with."""
    gpu = {"driver": driver(), "l2_mib": l2_bytes() >> 20, "devices": torch.cuda.device_count()}
    stamp = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    return {"machine": machine() | gpu, **stamp}


def begin(folder: Path) -> Path:
    """The file of this GPU, its header renewed; steps and rows that were measured before stay until they are again."""
    file = folder / f"{slug()}.json"
    content = read(file if file.exists() else results.FOLDER / file.name)
    kept = {name: content.get(name, empty) for name, empty in EMPTY.items()}
    write(file, header() | kept)
    return file


def run(file: Path, seconds: float) -> None:
    """Copy rate, then the cases in their order."""
    started, stamp = time.perf_counter(), header()
    print(f"{stamp['machine']}\n{stamp['versions']}")
    copy = copy_bandwidth()
    content = read(file)
    content["ceilings"] = {"copy_gb_per_s": round(copy / 1e9, 1)}
    write(file, content)
    philox, fault = attempt(philox_words)
    content["ceilings"] |= {} if fault else {"philox_gwords_per_s": round(philox / 1e9, 1)}
    print(content["ceilings"])
    jobs = cases()
    while jobs and time.perf_counter() - started < seconds:
        case = jobs.pop(0)
        print(f"{case.op}: {case.name}", flush=True)
        for row in measure(case, suite.backends(), (copy, philox or math.inf)):
            fresh = row | {name: stamp[name] for name in ("commit", "date", "versions")}
            same = [r for r in content["rows"] if [r[k] for k in KEY] == [row[k] for k in KEY]]
            content["rows"] = [r for r in content["rows"] if r not in same] + [fresh]
            write(file, content)
        torch.cuda.empty_cache()
    left = ", ".join(f"{case.op}: {case.name}" for case in jobs)
    print(f"saved in {file.name}" + (f"; out of time before {left}" if left else ""))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--begin", metavar="FOLDER", help="write the header of the GPU's file, print its path")
    parser.add_argument("--file", help="result file")
    parser.add_argument("--seconds", type=float, default=480.0, help="no new case after so long")
    chosen = parser.parse_args()
    if chosen.begin:
        print(begin(Path(chosen.begin)))
    else:
        run(Path(chosen.file), chosen.seconds)


if __name__ == "__main__":
    main()
