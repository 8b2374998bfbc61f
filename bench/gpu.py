"""python -m bench.gpu: what bench/gpu.sh measures. Figures of a GPU come only from here.

A call reads rows that are cold in L2 (a graph walks through inputs that together exceed it twice). A row tells the
median of graph replays, the time with launches, the bytes the rule must read (MIN) a second, and its share of the
measured copy bandwidth; under rule match also the share of the slower floor, copy or Philox words.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from . import results, suite
from .cases import BOTH, Case
from .gpu_clock import clock, copy_bandwidth, l2_bytes, philox_words
from .machine import commit, machine, progress, slug, versions
from .minimum import minimum
from .rows import ChainInput
from .tree_mask import PAST, MaskCase
from .trees import TreeCase

MAX_INPUTS = 24
ON_PAIRS = ("acceptance_ratios", "residual_probs", "residual_sample")  # of a target and a draft row, as chains are


def cases() -> list[Any]:
    """Cases: batch 64 with draft 5, its neighbours, one request, trees and caches."""
    others = [op for op in suite.OPS if op not in ("verify_chain", "sample", *ON_PAIRS, "tree_cache", "linear")]
    op, bf16 = "verify_chain", "bf16"
    return [
        *(Case(op, batch=64, dtype=bf16, rule=rule) for rule in ("ratio", "greedy", "match", "block", "typical")),
        Case(op, batch=64, dtype=bf16, filters=BOTH),
        Case(op, batch=1, dtype=bf16),
        Case(op, batch=1, dtype=bf16, filters=BOTH),
        Case(op, batch=16, dtype=bf16),
        Case(op, batch=16, compiled=True),
        Case(op, vocab=151936, batch=256, draft=3, dtype=bf16),
        Case("sample", batch=64, dtype=bf16),
        Case("sample", batch=64, dtype=bf16, filters=BOTH),
        *(Case(name, batch=64, dtype=bf16) for name in ON_PAIRS),
        *(suite.module(name).CASES[0] for name in others),
        *(TreeCase("verify_tree", dtype=bf16, rule=rule) for rule in ("greedy", "target_only")),  # SGLang's rules
        MaskCase("tree_mask", 64, 64, format=f"flat, past {PAST}"),
    ]


def cold(made: list[Any]) -> list[Any]:
    """Copies of the inputs until a walk through them is twice the L2 cache; trees and caches exceed it as they are."""
    if not isinstance(made[0], ChainInput):
        return made
    one = made[0].target.nbytes + made[0].draft.nbytes
    count = min(MAX_INPUTS, max(2, -(-2 * l2_bytes() // one)))
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


def measure(case: Any, backends: list[str], copy: float, philox: float) -> list[dict[str, Any]]:
    """Rows of one case: each contender checked, then timed."""
    made = cold(suite.module(case.op).inputs(case))
    rows = []
    for contender in suite.contenders(case, made, backends):
        try:
            contender.check(made[0])
            timed = clock(contender.run, made)
        except Exception as error:
            torch.cuda.synchronize()
            progress(f"  {contender.name} is left out: {type(error).__name__}: {str(error)[:300]}")
            rows.append({"contender": contender.name, "is_ours": contender.is_ours, "left_out": str(error)[:300]})
            continue
        row = {"contender": contender.name, "is_ours": contender.is_ours, **timed}
        if contender.is_ours and isinstance(case, Case):
            row |= shares(case, row, made[0], copy, philox)
        share = f"   {row['of_copy']:.0%} of copy" if "of_copy" in row else ""
        print(
            f"  {contender.name:<28}{row['p50_us']:>10.1f} us   launched {row['launched_p50_us']:>10.1f}{share}",
            flush=True,
        )
        rows.append(row)
    ours = next((r["p50_us"] for r in rows if r["is_ours"] and "p50_us" in r), None)
    for row in rows:
        row |= {"op": case.op, "case": case.name, "threads": 0}
        row |= {k: v for k, v in dataclasses.asdict(case).items() if k not in ("op", "compiled", "threads")}
        if ours and "p50_us" in row:
            row["times_ours"] = round(row["p50_us"] / ours, 3)
    return rows


def read_steps(file: str) -> list[dict[str, str]]:
    """Steps of gpu.sh: name, verdict, seconds."""
    if not file or not Path(file).exists():
        return []
    lines = [line.split("\t") for line in Path(file).read_text().splitlines()]
    return [{"step": a, "verdict": b, "seconds": c} for a, b, c in lines]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(results.FOLDER), help="folder of the result file")
    parser.add_argument("--steps", default="", help="what gpu.sh did before")
    parser.add_argument("--only-steps", action="store_true", help="note the steps, measure nothing")
    parser.add_argument("--seconds", type=float, default=105.0, help="no new case after so long")
    chosen = parser.parse_args()
    file = Path(chosen.out) / f"{slug()}.json"
    if chosen.only_steps:
        content = results.load(file)
        content["steps"] = read_steps(chosen.steps)
        results.write(file, content)
        return
    copy, philox = copy_bandwidth(), philox_words()
    ceilings = {"copy_gb_per_s": round(copy / 1e9, 1), "philox_gwords_per_s": round(philox / 1e9, 1)}
    print(f"{machine()}\n{versions()}\n{ceilings}, L2 {l2_bytes() >> 20} MiB")
    content: dict[str, Any] = {"machine": machine(), "ceilings": ceilings, "rows": []}
    started = time.perf_counter()
    for case in cases():
        if time.perf_counter() - started > chosen.seconds:
            progress(f"out of time before {case.op}: {case.name}")
            continue
        print(f"{case.op}: {case.name}")
        fresh = measure(case, suite.backends(), copy, philox)
        stamp = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "versions": versions()}
        content["rows"] += [row | stamp for row in fresh]
        content["steps"] = read_steps(chosen.steps)
        results.write(file, content)  # after each case: a run cut short keeps what it has
        torch.cuda.empty_cache()
    print(f"saved in {file.name}")


if __name__ == "__main__":
    main()
