"""The command ``lossless``: does speculation change what a model says? Answers for this package and for others."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import figures, report
from .experiments import Finding, judge
from .family import (
    SMALL,
    Job,
    caught,
    fault_jobs,
    first_jobs,
    impossible,
    joint_jobs,
    run_all,
    small_tables,
    stream_jobs,
)
from .faults import FAULTS
from .laws import Filters, Table, flat_table, processed
from .methods import METHODS
from .models import FOLDER, Pair, first_tokens, load, next_tokens
from .samplers import load as load_sampler
from .samplers import method_of, refusal
from .texts import compare, written
from .tradeoff import front, win_rates

EXPERIMENTS = ("streams", "first", "next", "texts", "faults", "tradeoff")
ON_MODELS = {"first", "next", "texts", "tradeoff"}
EXAMPLE = ((0.2, 0.3, 0.1, 0.4), (0.5, 0.3, 0.15, 0.05))  # target and draft of docs/design.md's table of epsilons
FAULT_TEXTS = 40_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--target", help=f"transformers folder of the target (default: {FOLDER.name}/target)")
    parser.add_argument("--draft", help=f"transformers folder of the draft model (default: {FOLDER.name}/draft)")
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, help="all but with --sampler or --inject")
    parser.add_argument("--method", action="append", choices=[m.name for m in METHODS], help="only these (repeatable)")
    parser.add_argument("--samples", type=int, default=1_000_000, help="first tokens of a prompt and method")
    parser.add_argument("--filtered", type=int, default=50_000, help="the same with filters, on the first prompt")
    parser.add_argument("--texts", type=int, default=30_000, help="texts of a stream or a joint law")
    parser.add_argument(
        "--inject", choices=[f.name for f in FAULTS], help="break the sampler; exit status 1: it was caught"
    )
    parser.add_argument(
        "--sampler", action="append", default=[], help="module of another sampler, e.g. bench.rivals.eager"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="most of an experiment on another sampler")
    parser.add_argument("--pairs", type=int, default=500, help="pairs of texts a prompt in the win-rate table")
    parser.add_argument("--prompts", type=int, default=200, help="prompts of the win-rate table")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--json", help="write the run here")
    parser.add_argument("--page", help="write the page here, a Markdown file")
    parser.add_argument("--figures", help="write the figures into this folder")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 1 where a test failed or a fault was missed; 2: it could not be run."""
    started = time.perf_counter()
    try:
        if args.inject:
            return _inject(args)
        chosen = args.experiments or ([] if args.sampler else list(EXPERIMENTS))
        pair = load(args.target, args.draft) if ON_MODELS & set(chosen) else None
        result = _family(args, chosen, pair)
        result["samplers"] = _samplers(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    result["seconds"] = time.perf_counter() - started
    print(report.summary(result))
    if args.json:
        report.write(args.json, result)
    if args.page:
        home = os.path.relpath(args.figures, Path(args.page).parent) if args.figures and pair else ""
        theory = report.simulations(Path(args.page).parent / "theory", "theory")
        Path(args.page).write_text(report.page(result, home, theory))
    failed = any(row["verdict"] == "biased" for row in result["samplers"])
    return 0 if report.succeeded(result) and (args.page or not failed) else 1


def _family(args: argparse.Namespace, chosen: Sequence[str], pair: Pair | None) -> dict[str, Any]:
    methods = [m for m in METHODS if not args.method or m.name in args.method]
    jobs: list[Job] = []
    if pair and "first" in chosen:
        jobs += first_jobs(pair, methods, args.samples, args.filtered)
    if pair and "next" in chosen:
        jobs += joint_jobs(pair, methods, args.texts)
    if "streams" in chosen:
        jobs += stream_jobs(methods, args.texts)
    findings = run_all(jobs, args.workers, lambda done, finding: _progress(done, len(jobs), finding)) if jobs else []
    findings += [impossible(method) for method in methods if method.name == "ratio" and "streams" in chosen]
    judge(findings)
    for finding in findings:
        if not finding.passed:
            print(report.line(finding.row()))
    texts = compare(pair, written(pair, 32), 64) if pair and "texts" in chosen else []
    for text in texts:
        print(
            f"{'pass' if text.passed else 'FAIL'}  texts  {text.method}: {text.different} of {text.prompts} differ",
            flush=True,
        )
    points, wins = _tradeoff(args, pair) if pair and "tradeoff" in chosen else ([], [])
    if args.figures and pair:
        _draw(Path(args.figures), pair, findings, points)
    return {
        "machine": report.machine(), "command": _command(), "models": pair.name if pair else "none",
        "findings": [f.row() for f in findings], "texts": [t.row() for t in texts],
        "faults": _faults(args) if "faults" in chosen else [], "front": [p.row() for p in points],
        "win_rates": [w.row() for w in wins],
    }  # fmt: skip


def _command() -> str:
    """As it was typed."""
    return "python -m specdec_loop.lossless " + " ".join(a for a in sys.argv[1:] if a != "lossless")


def _hint(finding: Finding) -> str:
    """A finding as it comes in; whether it passed is decided when the family is complete."""
    passed = min(finding.fit.chi_square, finding.fit.g, finding.tokens_p) > 1e-6
    return report.line({**finding.row(), "passed": passed})


def _progress(done: int, total: int, finding: Finding) -> None:
    print(f"{done:>4}/{total}  {_hint(finding)}", flush=True)


def _inject(args: argparse.Namespace) -> int:
    """The laboratory with one broken method."""
    fault = next(f for f in FAULTS if f.name == args.inject)
    print(f"{fault.name}: {fault.what}")
    if fault.impossible:
        findings = caught(fault, args.texts)
    else:
        findings = run_all(list(fault_jobs(fault, args.texts)), args.workers, lambda *_: None)
    passed = judge(findings)
    for finding in findings:
        print(report.line(finding.row()))
    print("not caught" if passed else "caught")
    return 0 if passed else 1


def _faults(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every fault, which must be caught."""
    jobs = {fault.name: [] if fault.impossible else list(fault_jobs(fault, FAULT_TEXTS)) for fault in FAULTS}
    flat = [job for each in jobs.values() for job in each]
    done = iter(run_all(flat, args.workers, lambda done, finding: None))
    rows = []
    for fault in FAULTS:
        findings = [next(done) for _ in jobs[fault.name]] or caught(fault, FAULT_TEXTS)
        passed = judge(findings)
        variation = max(finding.fit.variation for finding in findings)
        p = min(finding.adjusted for finding in findings)
        print(f"{'MISSED' if passed else 'caught'}  {fault.name}: {fault.what} (adjusted p {p:.1g})", flush=True)
        rows.append({"name": fault.name, "what": fault.what, "caught": not passed, "p": p, "variation": variation})
    return rows


def _tradeoff(args: argparse.Namespace, pair: Pair) -> tuple[list[Any], list[Any]]:
    example = tuple(torch.tensor(law).log() for law in EXAMPLE)
    table = first_tokens(pair, pair.prompts[0])
    rows = {"p (.2 .3 .1 .4), q (.5 .3 .15 .05)": example, "prompt 1": (table.target[0], table.draft[0])}
    points = front(rows, min(args.samples, 100_000))  # type: ignore[arg-type]
    tables = [next_tokens(pair, prompt) for prompt in written(pair, args.prompts)]
    return points, win_rates(tables, {"top_k": 4}, length=3, pairs=args.pairs)


def _draw(folder: Path, pair: Pair, findings: list[Finding], points: list[Any]) -> None:
    shown = [f for f in findings if f.experiment == "first token" and f.method == "ratio" and "," not in f.case]
    if shown:
        figures.first_tokens(shown[:4], folder / "first_tokens.png")
    table = first_tokens(pair, pair.prompts[0])
    figures.proof(processed(table.target[0]), processed(table.draft[0]), folder / "proof.png")
    if points:
        figures.front(points, folder / "front.png")


# --- other samplers


def peaked_row(peak: float, seed: int, vocab: int = 32_768, spread: float = 0.3) -> torch.Tensor:
    """One likely id above a nearly flat tail: a search for the top-p threshold on linear probabilities gets lost."""
    law = torch.full((vocab,), (1 - peak) / (vocab - 1))
    law[0] = peak
    return law.log() + spread * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def _samplers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the page about other samplers, judged as one family."""
    torch.manual_seed(0)
    asked = [row for name in args.sampler for row in _sampler(name, args)]
    judge([finding for _, finding in asked if finding is not None])
    rows = []
    for row, finding in asked:
        if finding is not None:
            row["verdict"] = "pass" if finding.passed else "biased"
            row["draws"], row["p"] = finding.fit.draws, f"{finding.adjusted:.2g}"
            row["variation"] = f"{finding.fit.variation:.3f} / {finding.fit.expected_variation:.3f}"
        rows.append(row)
        print(f"{row['verdict']}  {row['name']}: {row['case']}, p {row['p']}, TV {row['variation']} {row['note']}")
    return rows


def _sampler(name: str, args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Finding | None]]:
    """What one sampler made of each case that is for it."""
    module = load_sampler(name)
    blank = {"name": f"{module.NAME} (`{name}`, {module.version()})", "draws": 0, "p": "", "variation": "", "note": ""}
    reason = module.available()
    if reason is not None:
        yield {**blank, "case": "", "verdict": "not run", "note": reason}, None
        return
    method, tables = method_of(name), small_tables()
    eight, history = tables["eight ids"], tables["history of 3 ids"]
    peaked = flat_table(peaked_row(0.8, seed=0).expand(3, -1), peaked_row(0.7, seed=1).expand(3, -1))
    cases: list[tuple[str, Table, int, Filters]] = [
        ("eight ids, two tokens", *eight, {}),
        ("history of 3 ids, six tokens", *history, {}),
        ("history of 3 ids, top-k", *history, SMALL["top-k"]),
        ("history of 3 ids, top-p", *history, SMALL["top-p"]),
        ("peaked row of 32,768 ids, top-p 0.9", peaked, 1, {"top_p": 0.9}),
    ]
    for case, table, length, filters in cases:
        if refusal(module, filters, table.vocab) is None:
            finding = Job("other", case, method, table, filters, args.texts, length, args.seconds).run()
            print(_hint(finding), flush=True)
            note = _exact_bias(module, table, filters) if table is peaked and hasattr(module, "filtered_logits") else ""
            yield {**blank, "case": case, "note": note}, finding


def _exact_bias(module: Any, table: Table, filters: Filters) -> str:
    """What a sampler's filter keeps of a row, beside what is right."""
    law = [torch.tensor([filters[name]]) if name in filters else None for name in ("temperature", "top_k", "top_p")]
    kept = module.filtered_logits(table.target[:1, None], torch.ones(1) if law[0] is None else law[0], *law[1:])[0, 0]
    exact = processed(table.target[0], **filters)  # type: ignore[arg-type]
    bias = float((kept.double().softmax(-1) - exact).abs().sum() / 2)
    counts = int((kept > -torch.inf).sum()), int((exact > 0).sum())
    return f"keeps {counts[0]:,} ids where {counts[1]:,} are right: TV {bias:.4f} exactly"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m specdec_loop.lossless", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))
