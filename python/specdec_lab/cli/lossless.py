"""Does speculation change what a model says? Every method, every known fault, and the samplers of others."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdec_loop.cli.arguments import default_model
from specdec_loop.cli.errors import UserError, one_line
from specdec_loop.cli.report import machine

from ..lossless import figures, loop, report, texts
from ..lossless.exact import processed
from ..lossless.experiments import Finding, judge
from ..lossless.family import (
    Call,
    caught,
    edit_jobs,
    fault_jobs,
    first_jobs,
    impossible,
    joint_jobs,
    run_all,
    stream_jobs,
)
from ..lossless.faults import FAULTS
from ..lossless.models import Pair, first_tokens, load, quiet
from ..lossless.others import judged, other_jobs
from ..lossless.procedures import PROCEDURES
from ..lossless.rejections import scaling, simulations
from ..lossless.tradeoff import duels_on_models, example, front, win_rates
from .arguments import EXPERIMENTS

ON_MODELS = {"first", "next", "texts", "tradeoff"}
FAULT_TEXTS = 160_000  # the weakest, g3-tree, was missed with a quarter of them
TEXTS, TEXT_TOKENS = 32, 48  # prompts of the loop's texts, and tokens of each
FRONT_DRAWS, BATCH_TEXTS, LOOP_TEXTS = 100_000, 4000, 6000


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 1 where a test failed or a fault was missed."""
    _check_names("--method", args.method, [procedure.name for procedure in PROCEDURES])
    _check_names("--inject", [args.inject] if args.inject else [], [fault.name for fault in FAULTS])
    with one_line():
        return _inject(args) if args.inject else _measure(args)


def _check_names(option: str, given: Sequence[str] | None, known: Sequence[str]) -> None:
    """Refuse unknown names. Some names contain commas, so the message quotes them."""
    for name in given or ():
        if name not in known:
            raise UserError(f"{option}: must be one of {', '.join(map(repr, known))}, got {name!r}")


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


def _measure(args: argparse.Namespace) -> int:
    """Everything that was asked for, in one pool of processes."""
    started = time.perf_counter()
    chosen = args.experiments or ([] if args.sampler else list(EXPERIMENTS))
    quiet()
    if ON_MODELS & set(chosen):
        args.target = args.target or str(default_model("--target", "target"))
        args.draft = args.draft or str(default_model("--draft", "draft"))
        args.heads = args.heads or str(default_model("--heads"))
    pair = load(args.target, args.draft) if ON_MODELS & set(chosen) else None
    plan = Plan(args, chosen, pair)
    jobs = [job for group in plan.groups.values() for job in group]
    found = run_all(jobs, args.workers, lambda done, what: print(f"{done:>4}/{len(jobs)}  {said(what)}", flush=True))
    result = plan.result(found)
    result["drawn"] = plan.draw(args.figures) if args.figures else []
    result["seconds"] = time.perf_counter() - started
    print(report.summary(result))
    if args.json:
        report.write(args.json, result)
    if args.page:
        home = os.path.relpath(args.figures, args.page.parent) if args.figures else ""
        args.page.write_text(report.page(result, home))
    is_biased = any(row["verdict"] == "biased" for row in result["samplers"])
    return 0 if report.succeeded(result) and (args.page or not is_biased) else 1


def said(found: Any) -> str:
    """One line about a finished job; its verdict needs the complete family."""
    if isinstance(found, Finding):
        passed = min(found.fit.chi_square, found.fit.g, found.tokens_p) > 1e-6
        return report.line({**found.row(), "passed": passed})
    if isinstance(found, texts.Texts):
        if found.reason:
            return f"left out: texts, {found.method}: {found.reason}"
        verdict = "pass" if found.passed else "FAIL"
        differ = f"{found.different} of {found.prompts} differ" if found.drafts else "drafted nothing"
        return f"{verdict}  texts, {found.method}: {differ}  {found.seconds:.1f} s"
    what, seconds = found
    name = type(what[0] if isinstance(what, list) else what).__name__.lower()
    return f"{name} measured  {seconds:.1f} s"


def seconds_of(found: Any) -> float:
    """Of a processor."""
    return float(found[1] if isinstance(found, tuple) else found.seconds)


@dataclass
class Plan:
    """The jobs of a run, and what is made of their results.

    Attributes:
        args: of the command.
        chosen: experiments.
        pair: the models, where an experiment needs them.
        groups: jobs by experiment, those that take long first.
        found: results by experiment.
    """

    args: argparse.Namespace
    chosen: Sequence[str]
    pair: Pair | None
    groups: dict[str, list[Any]] = field(default_factory=dict)
    found: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Collect the jobs."""
        args, pair = self.args, self.pair
        methods = [m for m in PROCEDURES if not args.method or m.name in args.method]
        folders = (args.target, args.draft)
        self.faults = {f.name: [] if f.impossible else list(fault_jobs(f, FAULT_TEXTS)) for f in FAULTS}
        self.others = [other_jobs(name, args.texts, args.seconds) for name in args.sampler]
        if pair and "first" in self.chosen:
            self.groups["first"] = list(first_jobs(pair, methods, args.samples, args.filtered))
        if "batch" in self.chosen:
            self.groups["batch"] = list(simulations(BATCH_TEXTS))
        if pair and "texts" in self.chosen:
            self.groups["texts"] = list(texts.jobs(*folders, args.heads, TEXTS, TEXT_TOKENS))
        if pair and "tradeoff" in self.chosen:
            row = first_tokens(pair, pair.prompts[0])
            rows = {**example(), "prompt 1": (row.target[0], row.draft[0])}
            self.groups["front"] = list(front(rows, min(args.samples, FRONT_DRAWS)))
            prompts = texts.written(pair, args.prompts)
            self.groups["win rates"] = [
                Call(duels_on_models, (*folders, prompt, number, args.pairs, args.length))
                for number, prompt in enumerate(prompts)
            ]
        if pair and "next" in self.chosen:
            self.groups["next"] = list(joint_jobs(pair, methods, args.texts))
        if "streams" in self.chosen:
            self.groups["streams"] = list(stream_jobs(methods, args.texts))
        if "edits" in self.chosen:
            self.groups["edits"] = list(edit_jobs(methods, args.texts))
        if "loop" in self.chosen:
            self.groups["loop"] = list(loop.jobs(min(args.texts, LOOP_TEXTS)))
        if "faults" in self.chosen:
            self.groups["faults"] = [job for jobs in self.faults.values() for job in jobs]
        if self.others:
            self.groups["samplers"] = [job for _, jobs in self.others for job in jobs]

    def result(self, found: Sequence[Any]) -> dict[str, Any]:
        """The run, for JSON and page."""
        left = iter(found)
        self.found = {name: [next(left) for _ in jobs] for name, jobs in self.groups.items()}
        get = self.found.get
        ours: list[Finding] = [f for name in ("first", "next", "streams", "edits", "loop") for f in get(name, [])]
        if "streams" in self.chosen:
            ours += [
                impossible(m) for m in PROCEDURES if m.name == "ratio" and m.name in (self.args.method or [m.name])
            ]
        judge(ours)
        for finding in ours:
            if not finding.passed:
                print(report.line(finding.row()))
        rows = judged([row for rows, _ in self.others for row in rows], get("samplers", []))
        for row in rows:
            print(f"{row['verdict']}  {row['name']}: {row['case']}, p {row['p']}, TV {row['variation']} {row['note']}")
        duels = [duel for duel, _ in get("win rates", [])]
        rates = win_rates(duels, pairs=self.args.pairs, length=self.args.length) if duels else []
        timings = {name: round(sum(map(seconds_of, some)), 1) for name, some in self.found.items()}
        for name, seconds in timings.items():
            print(f"{name}: {len(self.groups[name])} experiments, {seconds:.0f} s of a processor")
        return {
            "machine": machine(), "command": "python -m specdec_lab " + shlex.join(sys.argv[1:]),
            "models": self.pair.name if self.pair else "none", "findings": [f.row() for f in ours],
            "texts": [t.row() for t in get("texts", [])], "faults": self._faults() if "faults" in self.chosen else [],
            "front": [asdict(point) for point, _ in get("front", [])], "win_rates": [asdict(rate) for rate in rates],
            "batch": self._batch() if "batch" in self.chosen else {}, "samplers": rows, "timings": timings,
        }  # fmt: skip

    def _faults(self) -> list[dict[str, Any]]:
        """Every fault, which must be caught."""
        left, rows = iter(self.found["faults"]), []
        for fault in FAULTS:
            findings = [next(left) for _ in self.faults[fault.name]] or caught(fault, FAULT_TEXTS)
            passed = judge(findings)
            variation, p = max(f.fit.variation for f in findings), min(f.adjusted for f in findings)
            print(f"{'MISSED' if passed else 'caught'}  {fault.name}: {fault.what} (adjusted p {p:.1g})")
            rows.append({"name": fault.name, "what": fault.what, "caught": not passed, "p": p, "variation": variation})
        return rows

    def _batch(self) -> dict[str, Any]:
        """Algorithm 4 beside its theorems."""
        self.seen = sorted((seen for seen, _ in self.found["batch"]), key=lambda seen: seen.drafts)
        self.scaling = scaling()
        return {"simulations": [asdict(seen) for seen in self.seen], "scaling": self.scaling}

    def draw(self, folder: Path) -> list[str]:
        """Draw what was measured; returns names of the figures."""
        drawn = []
        firsts = [f for f in self.found.get("first", []) if f.method == "ratio" and "," not in f.case]
        if firsts:
            figures.first_tokens(firsts[:4], folder / "first_tokens.png")
            drawn.append("first_tokens")
        if self.pair:
            row = first_tokens(self.pair, self.pair.prompts[0])
            figures.proof(processed(row.target[0]), processed(row.draft[0]), folder / "proof.png")
            drawn.append("proof")
        if points := [point for point, _ in self.found.get("front", [])]:
            figures.front(points, folder / "front.png")
            drawn.append("front")
        if "batch" in self.found:
            figures.simulations(self.seen, self.scaling, folder / "rejections.png")
            drawn.append("rejections")
        return drawn
