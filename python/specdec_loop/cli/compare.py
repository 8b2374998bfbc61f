"""Methods side by side: speed, acceptance, prediction, and whether the text is that of plain decoding."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..methods import METHODS
from .errors import UserError, check_output, one_line, read_text
from .loading import Models, check_methods
from .measure import RIVALS, Comparison, Row, all_cases
from .progress import progress
from .report import new_console, print_tables, write_chart, write_json

UNEVEN = 8  # so many lengths have prompts: those of a batch are seldom equal, and equal ones are faster


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    console = new_console()
    if args.list:
        for name, method in METHODS.items():
            print(f"{name:18} rule {method.rule:10} {method.about}")
        return
    check_methods("--methods", args.methods or ())
    _check_batches(args.batch, len(args.prompts) if args.prompts else args.count)
    for option, file in (("--json", args.json), ("--png", args.png)):
        if file is not None:
            check_output(option, file)
    models = Models(args)
    methods = args.methods or available(models, console)
    rivals = [r for r in RIVALS if r != "transformers assisted" or "draft-model" in methods] if args.rivals else []
    rows = compare(models, prompts_of(models, args), methods, rivals, args, console)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    settings["prompts"] = [str(path) for path in args.prompts or ()]
    if args.json:
        write_json(rows, settings, args.json)
    if args.png:
        with one_line():
            write_chart(rows, args.png)


def compare(
    models: Models,
    prompts: Sequence[list[int]],
    methods: Sequence[str],
    rivals: Sequence[str],
    args: argparse.Namespace,
    console: Console,
) -> list[Row]:
    """Run all cases, report progress, and print their tables."""
    cases = all_cases(methods, args.temperature, args.batch, rivals)
    with progress("warming up") as report:
        comparison = Comparison(models, prompts, cases, args.max_new_tokens)
        steps = comparison.steps(args.rounds)
        for done, case in enumerate(comparison.rounds(args.rounds), 1):
            report(done, steps, f"{case.method}, temperature {case.temperature:g}, batch {case.batch}")
    rows = comparison.rows()
    print_tables(rows, console)
    return rows


def available(models: Models, console: Console) -> list[str]:
    """Methods that have what they need; says of the others what they lack."""
    found = []
    for name in METHODS:
        try:
            models.drafter(name)
            found.append(name)
        except UserError as error:
            console.print(f"left out: {error}", style="dim", highlight=False)
    return found


def _check_batches(batches: Sequence[int], prompts: int) -> None:
    """Refuse a batch that the prompts do not fill: its row would report another size than it ran."""
    for batch in batches:
        if prompts % batch:
            raise UserError(f"--batch: {batch} must divide the number of prompts, which is {prompts}")


def prompts_of(models: Models, args: argparse.Namespace) -> list[list[int]]:
    """Given ones, or the beginnings of code that no default model was trained on."""
    if args.prompts:
        return [models.encode(read_text("--prompts", path), args.max_new_tokens) for path in args.prompts]
    from .. import corpus

    made: list[list[int]] = []
    files = [path for path in corpus.sources() if corpus.is_held_out(path)]
    for path in files[:: max(len(files) // (2 * args.count), 1)]:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        ids = models.tokenizer("".join(lines[len(lines) // 3 :][: args.prompt_tokens]))["input_ids"]
        if len(ids) >= args.prompt_tokens and len(made) < args.count:
            made.append(ids[: args.prompt_tokens - len(made) % UNEVEN])
    if len(made) < args.count:
        raise UserError(f"only {len(made)} held-out files have {args.prompt_tokens} tokens: lower --count")
    return made
