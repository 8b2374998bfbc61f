"""python -m bench [op ...] [--quick]: times every contender of every case in one run, and saves the table.

Ours and the rivals take turns (timing.py), each after its check against the reference. Rows are kept in
bench/results/<machine>.json; a later run replaces the cases it measured again.
"""

from __future__ import annotations

import argparse
import time

import torch

from . import results, suite
from .cases import Case, Measured
from .machine import machine, progress, versions
from .rivals import rivals
from .timing import interleave


def run_case(case: Case, backends: list[str], seconds: float) -> dict[str, tuple[Measured, bool]]:
    """Check and time every contender of a case."""
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or threads)
    try:
        inputs = suite.module(case.op).inputs(case)
        field = []
        for contender in suite.contenders(case, inputs, backends):
            try:
                contender.check(inputs[0])
                field.append(contender)
            except (AssertionError, RuntimeError) as fault:  # wrong, or it cannot do this at all
                progress(f"  {contender.name} is left out: {fault}")
                if contender.is_ours:
                    raise SystemExit(f"bench: {case.op}, {case.name}: {contender.name} is wrong: {fault}") from fault
        times = interleave({c.name: c.run for c in field}, inputs, seconds=seconds)
        return {c.name: (times[c.name], c.is_ours) for c in field}
    finally:
        torch.set_num_threads(threads)


def print_case(case: Case, measured: dict[str, tuple[Measured, bool]]) -> None:
    """A block of the table: our best at 1.0, the rivals as multiples of our first."""
    ours = next(m for m, is_ours in measured.values() if is_ours)
    print(f"\n{case.op}: {case.name}")
    for name, (m, _) in measured.items():
        print(
            f"  {name:<28} {m.p50 / 1000:>10.3f} ms   p20 {m.p20 / 1000:>9.3f}   p80 {m.p80 / 1000:>9.3f}"
            f"   x{m.p50 / ours.p50:>7.2f}   {m.runs} runs"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("op", nargs="*", help=f"of {', '.join(suite.OPS)}; default all")
    parser.add_argument("--quick", action="store_true", help="the main cases")
    parser.add_argument("--backend", action="append", default=[], help="ours to time; may be repeated")
    parser.add_argument("--seconds", type=float, default=4.0, help="about so long a case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-save", action="store_true", help="leave bench/results alone")
    chosen = parser.parse_args()
    unknown = set(chosen.op) - set(suite.OPS)
    if unknown:
        parser.error(f"op must be one of {', '.join(suite.OPS)}, got {', '.join(sorted(unknown))}")
    backends = suite.backends(chosen.backend)
    print(", ".join(f"{k} {v}" for k, v in (machine() | versions()).items()))
    for rival in rivals():
        print(f"rival {rival.NAME}: {rival.WHY}. {rival.available() or rival.version()}")
    benches = [suite.module(op) for op in chosen.op or suite.OPS]
    jobs = [c for b in benches for c in b.CASES[: b.QUICK if chosen.quick else None] if chosen.only in c.name]
    started = time.perf_counter()
    for i, case in enumerate(jobs):
        progress(f"[{i + 1}/{len(jobs)}, {time.perf_counter() - started:.0f} s] {case.op}: {case.name}")
        measured = run_case(case, backends, chosen.seconds)
        print_case(case, measured)
        if not chosen.no_save:
            results.save(case, measured)
    if not chosen.no_save:
        print(f"\nsaved in {results.path().relative_to(results.ROOT)}")


if __name__ == "__main__":
    main()
