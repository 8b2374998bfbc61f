"""Compile every Triton kernel, as its launcher would, for every GPU we support; no GPU is needed.

The calls are those of tools/gpu_model/triton_calls.py. Prints registers, spills and shared memory of each kernel. Exits
with 1 if a kernel spills that is not known to (tools/gpu_model/limits.py), or more than it is known to.

    python tools/compile_triton.py [--target cuda:90] [--vocab 128256] [--case sample]

With --front-end, every kernel is translated and compiled no further, in four minutes of a core: whether another version
of Triton has all of the language that the kernels use.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":  # before triton is imported: kernels are compiled here, not interpreted
    os.environ.pop("TRITON_INTERPRET", None)

import triton

from tools.gpu_model.limits import SPILLS
from tools.gpu_model.triton_calls import OTHER_CASES, ROW_CASES, VOCABULARIES, Size
from tools.gpu_model.triton_run import TARGETS, front_end_only, resources, run

RESULTS = Path(__file__).resolve().parents[1] / "bench/results/gpu-model.json"
BATCH = 64
# One vocabulary: `make gpu-model` has compiled the others, and `make gpu-model-check` sees that it is as new as the
# sources. Where its results know every case, so that each spill is known, all of it is compiled; elsewhere these cases,
# at the small batch at which they have never spilled.
SMALL_BATCH, USUAL = 4, 128256
ONE_TILE = 1000
CLEAN = re.compile(
    r"verify_chain (ratio bf16( filters)?|ratio fp32 mask stats filters|match bf16( filters)?|greedy bf16)$|"
    r"verify_tree (match bf16|greedy fp32 1024|typical bf16|recursive bf16 filters|greedy_multi_draft bf16|"
    r"target_only bf16 1024|traversal fp32)$|sample|acceptance_ratios bf16 filters|residual_probs|"
    r"residual_sample bf16 filters map"
)
CASES = {case.name: case for case in ROW_CASES + OTHER_CASES}
KNOWN = {spill[1:5]: spill.bytes for spill in SPILLS if spill.backend == "triton"}


def places() -> list[tuple[str, int, int]]:
    """(target, vocabulary, batch) of what is compiled."""
    found = json.loads(RESULTS.read_text())["triton"]
    known = [
        place
        for place, cases in found.items()
        if place.endswith(f" {USUAL}") and all(case.name in cases for case in ROW_CASES)
    ]
    full = [(place.split()[0], int(place.split()[1]), BATCH) for place in known]
    return full + [(target, USUAL, SMALL_BATCH) for target in TARGETS if f"{target} {USUAL}" not in known]


def compile_case(work: tuple[str, int, int, str]) -> list[tuple[str, str, bool]]:
    """(hash, line to print, whether it spills more than is known) of every kernel that a case launches on a target."""
    target, vocab, batch, name = work
    found = []
    for launch in run(target, lambda: CASES[name].call(Size(batch, vocab))):
        used = resources(launch.compiled, target)
        is_fault = used.spilled > KNOWN.get((target, vocab, name, launch.kernel), 0)
        verdict = "  SPILL" if is_fault else "  spill, known" if used.spilled else ""
        numbers = f"{used.registers:4} registers {used.spilled:5} spilled {used.shared:6} shared{verdict}"
        found.append((launch.compiled.hash, f"{target:10} {vocab:6} {name:38} {launch.kernel:18} {numbers}", is_fault))
    return found


def translate_case(name: str) -> int:
    """How many launches of a case were translated, with rows of many tiles and of one; raises what Triton raises."""
    sizes, call = (Size(BATCH, USUAL), Size(BATCH, ONE_TILE)), CASES[name].call
    with front_end_only():
        return sum(len(run("cuda:90", functools.partial(call, size))) for size in sizes)


def main() -> int:
    """Compile every case for every target, on every core."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--vocab", type=int, choices=VOCABULARIES, action="append")
    parser.add_argument("--case", help="only cases whose name contains this", default="")
    parser.add_argument("--front-end", action="store_true", help="translate every kernel, compile none")
    options = parser.parse_args()
    started = time.perf_counter()
    if options.front_end:
        names = [name for name in CASES if options.case in name]
        with multiprocessing.get_context("spawn").Pool() as pool:
            count = sum(pool.imap_unordered(translate_case, names))
        print(f"{count} launches translated, {time.perf_counter() - started:.0f} s, triton {triton.__version__}")
        return 0
    chosen = [place for place in places() if place[0] in (options.target or TARGETS)]
    if options.vocab:
        chosen = [(target, vocab, BATCH) for target in options.target or TARGETS for vocab in options.vocab]
    work = [
        (*place, case.name)
        for place in chosen
        for case in ROW_CASES
        if options.case in case.name and (place[2] == BATCH or CLEAN.match(case.name))
    ]
    work += [(t, 0, SMALL_BATCH, c.name) for t in dict.fromkeys(p[0] for p in chosen) for c in OTHER_CASES
             if options.case in c.name]  # fmt: skip
    faults, seen = 0, set[str]()
    # Processes, for tracing and the passes hold the interpreter; started afresh, for torch's threads survive no fork.
    with multiprocessing.get_context("spawn").Pool() as pool:
        for kernels in pool.imap(compile_case, work):
            for kernel, line, is_fault in kernels:
                if kernel not in seen:
                    seen.add(kernel)
                    faults += is_fault
                    print(line, flush=True)
    print(f"{len(seen)} kernels, {faults} with spills that are not known, {time.perf_counter() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
