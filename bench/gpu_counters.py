"""python -m bench.gpu_counters [--file F --csv C]: hardware counters of our kernels, read by ncu.

Without arguments it makes the calls that ncu watches: two of each, at batch 64 and 128256 ids. With them it reads what
ncu wrote and puts a line a kernel into the file of the GPU, the last launch of each.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch

from . import suite
from .gpu_plan import counted
from .json_rows import read, write

METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "dram__bytes.sum": "dram_bytes",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "smsp__inst_executed.sum": "warp_instructions",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
}


def make_calls() -> None:
    """What is watched."""
    for case in counted():
        made = suite.module(case.op).inputs(case)
        for contender in suite.contenders(case, made[:1], suite.backends()):
            if contender.is_ours:
                for _ in range(2):
                    contender.run(made[0])
                torch.cuda.synchronize()


def counters(lines: list[str]) -> list[dict[str, Any]]:
    """A line a kernel from ncu's CSV, which has one for each metric of each launch; the last launch counts."""
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines[start:]):
        kernel = row["Kernel Name"].split("(")[0]
        metric = METRICS.get(row["Metric Name"])
        if metric:
            found.setdefault(kernel, {"kernel": kernel})[metric] = float(row["Metric Value"].replace(",", ""))
    return list(found.values())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_counters", description=__doc__.splitlines()[0])
    parser.add_argument("--file", help="result file")
    parser.add_argument("--csv", help="what ncu wrote")
    parser.add_argument("--metrics", action="store_true", help="print what to ask ncu for")
    chosen = parser.parse_args()
    if chosen.metrics:
        print(",".join(METRICS))
    elif chosen.csv:
        content = read(Path(chosen.file))
        content["counters"] = counters(Path(chosen.csv).read_text().splitlines())
        write(Path(chosen.file), content)
        print("\n".join(map(str, content["counters"])) or "ncu counted nothing")
    else:
        make_calls()


if __name__ == "__main__":
    main()
