"""python -m bench.traffic [--check]: bytes each op moves, as a multiple of MIN, without a GPU.

MIN is the sum of what the rule must read, in the logits' own dtype (docs/design.md, Cost). The budget is 1.05 MIN
without filters, 1.3 MIN with filters on rows shaped like a language model's, 2.4 MIN on any row. MIN of an op on trees
or caches is what a call must read and write, its budget stands in minimum.py; calls with edits and other options are in
option_traffic.py. `--check` exits 1 over budget.
Where the vocabulary is sharded, bytes that ranks send: exchange.py.
Statistics, workspace and results count. How each meter counts: meters.py. The rivals' multiples stand below ours.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

import specdec_kernels

from . import exchange, filter_traffic, option_traffic, results, suite
from .advance_state import StateCase
from .advance_window import WindowCase
from .allocate_drafts import BudgetCase
from .caches import CacheCase
from .cases import BOTH, FILTERS, Case, OpCase
from .edits import EditCase
from .machine import ROOT, commit, machine, progress, versions
from .meters import Bytes, host_meter, torch_only_meter, triton_meter
from .minimum import budget, draws, minimum
from .option_traffic import OptionCase
from .rivals import rivals
from .rows import DTYPES, chain
from .tree_attention import AttentionCase
from .tree_mask import PAST, MaskCase
from .trees import TreeCase

VOCAB = 32000  # eight tiles of 4096, the last not full; the interpreter takes a second a case
METERS: dict[str, Callable[[], AbstractContextManager[Bytes]]] = {"triton": triton_meter, "cuda_host": host_meter}
INTERPRETED = ("vLLM", "SGLang")
WRONG = "WRONG RESULT"
UNSEEN = ("compiled", "native")  # kernels that no meter sees into


class Metered(NamedTuple):
    """One line of the table."""

    case: OpCase
    contender: str
    minimum: int
    moved: Bytes
    budget: float | None  # None: a rival
    fault: str  # a meter of a wrong result means nothing


def cases() -> list[OpCase]:
    """Small vocabularies of several tiles, and one full one; filters on few rows: the interpreter is slow at them."""
    op, bf16 = "verify_chain", "bf16"
    made: list[OpCase] = [
        Case(op, VOCAB, 4, dtype=bf16, rule=rule) for rule in ("ratio", "greedy", "match", "typical", "block")
    ]
    made += [Case(op, VOCAB, 4), Case(op, 128256, 1, dtype=bf16)]
    # A row in a dozen has a wide nucleus that top-p alone reads twice: enough rows for an average.
    batches = {"top-p .95": 4}
    made += [Case(op, VOCAB, batches.get(f, 1), 2, bf16, f) for f in FILTERS if f != "none"]
    made += [Case(op, VOCAB, 1, 1, bf16, BOTH, rows=rows) for rows in ("flat", "peaked")]
    made += [Case("sample", VOCAB, 2, dtype=bf16, filters=filters) for filters in ("none", BOTH)]
    made += [Case("token_logprobs", VOCAB, 2, dtype=bf16)]
    made += [Case(other, VOCAB, 1, 3, bf16) for other in ("acceptance_ratios", "residual_probs", "residual_sample")]
    made += [
        TreeCase("verify_tree", 16, 64, "fp32", "match", VOCAB),
        TreeCase("verify_tree", 16, 8, bf16, "greedy", VOCAB),
    ]
    made += [CacheCase("compact_cache", 32, batch, f) for batch, f in ((1, "bhld"), (4, "bhld"), (4, "nhd"))]
    made += [CacheCase("rollback", 32, 16, "nhd"), CacheCase("gather_nodes", 32, 4, "blhd")]
    made += [CacheCase("select_state", 32, 1, "blhd"), StateCase("advance_state", 2)]
    made += [WindowCase("advance_window", 2)]
    made += [TreeCase("tree_layout", 64, 4), TreeCase("tree_layout", 256, 1)]
    made += [MaskCase("tree_mask", 64, 4), MaskCase("tree_mask", 256, 1, format="int32")]
    past = f"past {PAST}"
    made += [
        MaskCase("tree_mask", 64, 1, format=f"{f}, {past}") for f in ("bool", "additive bf16", "flat", "flat_packed")
    ]
    made += [TreeCase("select_tree", 64, 1), TreeCase("tree_from_sequences", 64, 1)]
    made += [TreeCase("tree_from_marginals", 64, 4)]
    made += [EditCase("edit_rows", 2), EditCase("count_tokens", 2)]
    made += [BudgetCase("allocate_drafts", 64, 5, 128)]
    return [*made, AttentionCase("tree_attention", 16, 1, 512), *option_traffic.cases()]


def build_input(case: OpCase) -> Any:
    """One batch, as the op's benchmark shapes it."""
    if not isinstance(case, Case):
        return suite.module(case.op).inputs(case)[0]
    draft = case.draft if case.op in ("verify_chain", "acceptance_ratios") else 1
    x = chain(case.batch, draft, case.vocab, dtype=DTYPES[case.dtype], filters=FILTERS[case.filters], shape=case.rows)
    if case.op in ("sample", "token_logprobs", "residual_probs", "residual_sample"):
        x = x._replace(target=x.target[:, 0].contiguous(), draft=x.draft[:, 0].contiguous())
    return x._replace(rng=x.rng._replace(step=torch.zeros_like(x.rng.seed)))


def meter_rows(case: Case, backend: str) -> list[Metered]:
    """Ours on rows of logits."""
    x = build_input(case)
    lines = []
    for name, call in suite.variants(case, backend).items():
        stats = "draft_stats" in name
        if stats and not (case.filters in ("none", BOTH) and case.rows == "llm"):
            continue
        with METERS[backend]() as moved:
            result = call(x)
        is_checked = case.op == "verify_chain" and case.rule == "ratio"
        is_right = not is_checked or torch.equal(result.num_accepted.long(), x.num_accepted)
        if case.rule == "block":  # accepts more than the rule that the input was made for
            x = x._replace(num_accepted=result.num_accepted)
        fault = "" if is_right else WRONG
        least = minimum(case, x, stats)
        lines.append(Metered(case, name, least, moved, round(budget(case) + draws(case) / least, 2), fault))
    return lines


def meter_ours(case: OpCase, backend: str) -> list[Metered]:
    """Ours in one case."""
    if isinstance(case, Case):
        return meter_rows(case, backend)
    if isinstance(case, OptionCase):
        return [meter_option(case, backend)]
    bench, x = suite.module(case.op), build_input(case)
    ours = suite.contenders(case, [x], [backend])[0]
    try:
        ours.check(x)
        fault = ""
    except AssertionError as error:
        fault = f"{WRONG}: {error}"
    with METERS[backend]() as moved:
        result = ours.run(x)
    least = bench.minimum(case, x, result)
    near = bench.near(case, backend) if hasattr(bench, "near") else 0
    return [Metered(case, backend, least, moved, round(budget(case) + near / least, 2), fault)]


def meter_option(case: OptionCase, backend: str) -> Metered:
    """Ours with an option."""
    x = option_traffic.batch_of(case)
    with METERS[backend]() as moved:
        result = option_traffic.run(case, x, backend)
    fault = "" if torch.equal(result.token_ids, option_traffic.run(case, x, "reference").token_ids) else WRONG
    least, allowed = option_traffic.minimum(case, x, result), option_traffic.budget(case, x, result, backend)
    return Metered(case, backend, least, moved, round(allowed / least, 2), fault)


def meter_rivals(case: OpCase) -> list[Metered]:
    """Rivals that are plain PyTorch at the case's size; interpreted Triton where it says so."""
    x, bench = build_input(case), suite.module(case.op)
    if isinstance(case, Case):
        least = minimum(case, x)
    else:
        other = build_input(case)  # ours may move its rows
        least = bench.minimum(case, other, suite.ours(case, "cpu")(other))
    lines = []
    for contender in suite.contenders(case, [x], []):
        if contender.name.startswith(UNSEEN):
            continue
        interpreted = contender.name.startswith(INTERPRETED)
        with (triton_meter if interpreted else torch_only_meter)() as moved:
            contender.run(x)
        lines.append(Metered(case, contender.name, least, moved, None, ""))
    return lines


def rival_cases() -> list[OpCase]:
    """Cases of ours that rivals are metered in; SGLang takes minutes over large trees."""

    def is_shared(case: OpCase) -> bool:
        if not isinstance(case, Case):
            return not isinstance(case, OptionCase) and getattr(case, "nodes", 0) <= 64
        usual = case.op == "verify_chain" and case.rule == "ratio" and case.dtype == "bf16"
        return (case.op == "sample" or usual) and case.rows == "llm" and case.filters in ("none", BOTH)

    return [case for case in cases() if is_shared(case)]


def available(names: list[str]) -> list[str]:
    """Meterable backends; the host-run CUDA library is built on demand."""
    sys.path.insert(0, str(ROOT / "tests"))
    import interpreter

    interpreter.patch_once()
    found = []
    for name in names:
        if name == "cuda_host":
            try:
                from native.build import build, load_backend
            except ImportError as error:
                progress(f"cuda_host is left out: {error}")
                continue
            load_backend(build())
        elif reason := specdec_kernels.available_backends("cpu")[name]:
            progress(f"{name} is left out: {reason}")
            continue
        found.append(name)
    return found


def backends_of(case: OpCase, backends: list[str]) -> list[str]:
    """Those that the op has."""
    declared = specdec_kernels._op.OPS[case.op].backends
    return [backend for backend in backends if backend.removesuffix("_host") in declared]


def is_within(line: Metered) -> bool:
    """Whether a line keeps its budget; rivals have none."""
    return line.budget is None or (line.moved.total <= line.budget * line.minimum and not line.fault)


def show(line: Metered) -> Metered:
    """Print a line."""
    verdict = line.fault or ("" if is_within(line) else "OVER")
    allowed = "" if line.budget is None else f"<= {line.budget:<5} {verdict}"
    print(
        f"  {line.contender:<28}{line.minimum / 1024:>11.1f}{line.moved.read / 1024:>12.1f}"
        f"{line.moved.written / 1024:>12.1f}{line.moved.total / line.minimum:>9.3f}  {allowed}",
        flush=True,
    )
    return line


def save(lines: list[Metered]) -> None:
    """Write bench/results/traffic.json, for docs/benchmarks.md."""
    stamp = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    fresh = [
        {
            "op": line.case.op,
            "case": line.case.name,
            "contender": line.contender,
            "is_ours": line.budget is not None,
            "min_bytes": line.minimum,
            "read_bytes": line.moved.read,
            "written_bytes": line.moved.written,
            "times_min": round(line.moved.total / line.minimum, 3),
            "budget": line.budget,
            **stamp,
        }
        for line in lines
    ]
    content = results.load(results.TRAFFIC)
    measured = {(row["op"], row["case"]) for row in fresh}
    kept = [row for row in content["rows"] if (row["op"], row["case"]) not in measured]
    results.write(results.TRAFFIC, {"machine": machine(), "rows": kept + fresh})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.traffic", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if an op of ours is over its budget")
    parser.add_argument("--save", action="store_true", help="write bench/results/traffic.json")
    parser.add_argument("--backend", action="append", default=[], choices=list(METERS), help="default: all that run")
    parser.add_argument("--only", default="", help="cases whose op and name contain this")
    parser.add_argument("--full", action="store_true", help="filters at real vocabularies alone: filter_traffic.py")
    chosen = parser.parse_args()
    started = time.perf_counter()
    backends = available(chosen.backend or list(METERS))
    if chosen.full:
        return filter_traffic.run({name: METERS[name] for name in backends}, chosen.only)
    print(f"  {'':<28}{'MIN KiB':>11}{'read KiB':>12}{'written KiB':>12}{'x MIN':>9}  budget")
    lines: list[Metered] = []
    for case in cases():
        if chosen.only in f"{case.op} {case.name}":
            print(f"{case.op}: {case.name}")
            lines += [show(line) for backend in backends_of(case, backends) for line in meter_ours(case, backend)]
    for case in rival_cases():
        if chosen.only in f"{case.op} {case.name}":
            print(f"rivals, {case.op}: {case.name}")
            lines += [show(line) for line in meter_rivals(case)]
    over = sum(not is_within(line) for line in lines)
    if chosen.only in "exchange":
        over += exchange.report()
    if chosen.save:
        save(lines)
    for rival in rivals():
        if reason := rival.available():
            print(f"{rival.NAME} is not metered: {reason}")
    print(f"{over} over budget, {time.perf_counter() - started:.0f} s")
    sys.exit(1 if chosen.check and over else 0)


if __name__ == "__main__":
    main()
