"""python -m tools.gpu_model [--arch 90 ...] [--vocab 128256 ...] [--case sample]: compile, count, write the page.

--stale counts anew only what was made of other sources; a Triton case only if it is translated to something else.
--check compiles a slice and compares it, and what is committed, with the limits; it writes nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # before triton is imported: kernels are compiled here, not interpreted
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build/gpu-model/triton"))

from . import collect, cuda, known, limits, page, rivals, triton_calls  # noqa: E402
from .triton_run import TARGETS  # noqa: E402

RESULTS = ROOT / "bench/results/gpu-model.json"
FIRST = ROOT / "bench/results/gpu-model-first-design.json"
PAGE = ROOT / "docs/gpu-model.md"


def say(*words: Any) -> None:
    print(time.strftime("%H:%M:%S"), *words, file=sys.stderr, flush=True)


def load() -> dict[str, Any]:
    """The committed results."""
    empty = {"made_of": {}, "translated": {}, "triton": {}, "cuda": {}, "rivals": {}, "known": {}}
    return empty | json.loads(RESULTS.read_text()) if RESULTS.exists() else empty


def save(content: dict[str, Any]) -> None:
    """Write one line a case, so that a change is seen where it is."""
    RESULTS.write_text(dump(content, 3) + "\n")


def dump(value: Any, depth: int, indent: str = "") -> str:
    """JSON with `depth` levels of objects spread over lines."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value, separators=(",", ":"))
    inner = indent + " "
    rows = [f"{inner}{json.dumps(k)}: {dump(v, depth - 1, inner)}" for k, v in sorted(value.items())]
    return "{\n" + ",\n".join(rows) + "\n" + indent + "}"


def run_triton(
    content: dict[str, Any], target: str, vocab: int, chosen: list[triton_calls.Case], is_stale_only: bool
) -> None:
    """Compile and count cases, on every core; of stale ones, what is translated to something else than before."""
    place = f"{target} {vocab}"
    kept, made_of, translated = (content[part].setdefault(place, {}) for part in ("triton", "made_of", "translated"))
    sources = {case.name: cuda.digest(collect.triton_sources(case.op)) for case in chosen}
    names = [case.name for case in chosen]
    if is_stale_only:
        names = [name for name in names if made_of.get(name) != sources[name] or name not in translated]
    # A process translates no kernel that it has compiled.
    with multiprocessing.get_context("spawn").Pool() as pool:
        texts = dict(zip(names, pool.imap(collect.translation, [(target, vocab, name) for name in names]), strict=True))
    works = []
    for name, text in texts.items():
        is_same = made_of.get(name) == sources[name] or translated.get(name) == text
        kernels = [launch["kernel"] for launch in kept[name]] if is_stale_only and is_same else None
        works.append((target, vocab, name, kernels))
    with multiprocessing.get_context("spawn").Pool() as pool:
        for (*_, name, kernels), found in zip(works, pool.imap(collect.named_case, works), strict=True):
            kept[name], made_of[name], translated[name] = found, sources[name], texts[name]
            say(place, name, "" if kernels is None else "(as it was)")
            save(content)


def run_rivals(content: dict[str, Any], target: str, vocab: int) -> None:
    """The same for kernels of others; their cases hold functions that no other process gets."""
    kept = content["rivals"].setdefault(f"{target} {vocab}", {})
    for case in rivals.cases(vocab):
        kept[case.name] = collect.triton_case(target, case, vocab)
        say(f"{target} {vocab} {case.name}")
        save(content)


def run(options: argparse.Namespace, content: dict[str, Any]) -> None:
    """Compile and count what was asked for; results are written after each part, so that a run can be cut."""
    known.run(content)
    rows, others = (
        [case for case in cases if options.case in case.name]
        for cases in (triton_calls.ROW_CASES, triton_calls.OTHER_CASES)
    )
    for vocab in options.vocab:
        for arch in options.arch:
            target = next(t for t in TARGETS if t.endswith(str(arch)))
            run_triton(content, target, vocab, rows, options.stale)
            if arch != 942 and not options.case and not options.stale:
                run_rivals(content, target, vocab)
    for arch in options.arch:
        target = next(t for t in TARGETS if t.endswith(str(arch)))
        run_triton(content, target, 0, others, options.stale)
        if arch != 942 and not options.case:
            run_cuda(content, arch, options.stale)


def run_cuda(content: dict[str, Any], arch: int, is_stale_only: bool) -> None:
    """Compile and count the CUDA sources, ours and, unless stale ones are asked for, FlashInfer's."""
    if cuda.nvcc() is None:
        return say("no nvcc: the CUDA kernels stay as they were")
    made = content["cuda"].setdefault(str(arch), {"kernels": {}, "calls": {}, "flashinfer": {}})
    made_of = content["made_of"].setdefault(f"sm_{arch}", {})
    sources = {path: cuda.digest(cuda.included(path)) for path in cuda.sources()}
    chosen = [path for path, digest in sources.items() if not is_stale_only or made_of.get(path.name) != digest]
    with multiprocessing.get_context("spawn").Pool() as pool:
        counted = pool.imap(collect.cuda_source, [(arch, path) for path in chosen])
        for path, found in zip(chosen, counted, strict=True):
            made["kernels"][path.name], made_of[path.name] = found, sources[path]
            say(f"sm_{arch} {path.name}")
            save(content)
    if any(path.stem in limits.CUDA_SLICE for path in chosen):
        made["calls"] = collect.cuda_calls(arch, [path for path in sources if path.stem in limits.CUDA_SLICE])
    if not is_stale_only:
        found = {name: collect.to_json(kernel) for name, kernel in rivals.flashinfer(arch).items()}
        made["flashinfer"] = found or made["flashinfer"]
    save(content)


def main() -> int:
    """Exits with 1 if a limit is broken or the committed results are old."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 80, 100, 120, 942])
    parser.add_argument("--vocab", type=int, nargs="+", default=[128256, 151936, 32000, 262144])
    parser.add_argument("--case", help="only Triton cases whose name contains this, and no CUDA", default="")
    parser.add_argument("--stale", action="store_true", help="only what was made of other sources")
    parser.add_argument("--check", action="store_true", help="compile a slice and compare; write nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the results; compile nothing")
    options = parser.parse_args()
    content, first = load(), json.loads(FIRST.read_text())
    if options.check:
        faults = limits.check(content)
        if not PAGE.exists() or PAGE.read_text() != page.text(content, first):
            faults.append("docs/gpu-model.md does not show bench/results/gpu-model.json (make gpu-model)")
    else:
        if not options.page:
            run(options, content)
        PAGE.write_text(page.text(content, first))
        faults = limits.faults(content)
    for fault in faults:
        print("FAULT", fault)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
