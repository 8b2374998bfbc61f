"""Methods side by side: speed, acceptance, prediction, and whether the text is that of plain decoding."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..methods import METHODS
from .loading import Models, UserError, add_draft_length, add_model_arguments
from .measure import RIVALS, Comparison, Row, all_cases
from .report import new_console, print_tables, write_chart, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: methods, prompts, repetitions."""
    parser.add_argument("--list", action="store_true", help="say what methods there are, and stop")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="by default all that have what they need")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--prompts", nargs="+", type=Path, help="text files, one prompt each; by default held-out code")
    parser.add_argument("--count", type=int, default=8, help="prompts, where none are given")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="their length, where none are given")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    add_draft_length(parser)
    parser.add_argument("--rounds", type=int, default=3, help="each case is given its median")
    parser.add_argument("--rivals", action="store_true", help="transformers' own generate, at batch 1")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--png", type=Path, help="draw a chart there")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    console = new_console()
    if args.list:
        for name, method in METHODS.items():
            print(f"{name:18} rule {method.rule:10} {method.about}")
        return
    unknown = sorted(set(args.methods or ()) - set(METHODS))
    if unknown:
        raise UserError(f"no method is called {', '.join(unknown)}: `compare --list` names them all")
    models = Models(args)
    methods = args.methods or available(models, console)
    rivals = [r for r in RIVALS if r != "transformers assisted" or "draft-model" in methods] if args.rivals else []
    rows = compare(models, prompts_of(models, args), methods, rivals, args, console)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    settings["prompts"] = [str(path) for path in args.prompts or ()]
    if args.json:
        write_json(rows, settings, args.json)
    if args.png:
        write_chart(rows, args.png)


def compare(
    models: Models,
    prompts: Sequence[list[int]],
    methods: Sequence[str],
    rivals: Sequence[str],
    args: argparse.Namespace,
    console: Console,
) -> list[Row]:
    """Run all cases under a progress bar and print their tables."""
    cases = all_cases(methods, args.temperature, args.batch, rivals)
    columns = TextColumn("{task.description:>40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=None)
        comparison = Comparison(models, prompts, cases, args.max_new_tokens)
        progress.update(task, total=comparison.steps(args.rounds))
        for case in comparison.rounds(args.rounds):
            name = f"{case.method}, temperature {case.temperature:g}, batch {case.batch}"
            progress.update(task, advance=1, description=name)
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


def prompts_of(models: Models, args: argparse.Namespace) -> list[list[int]]:
    """Given ones, or the beginnings of code that no default model was trained on."""
    if args.prompts:
        for path in args.prompts:
            if not path.is_file():
                raise UserError(f"--prompts: there is no file {path}")
        return [models.encode(path.read_text(encoding="utf-8"), args.max_new_tokens) for path in args.prompts]
    from .. import corpus

    made: list[list[int]] = []
    files = [path for path in corpus.sources() if corpus.is_held_out(path)]
    for path in files[:: max(len(files) // (2 * args.count), 1)]:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        ids = models.tokenizer("".join(lines[len(lines) // 3 :][: args.prompt_tokens]))["input_ids"]
        if len(ids) >= args.prompt_tokens and len(made) < args.count:
            made.append(ids[: args.prompt_tokens])
    if len(made) < args.count:
        raise UserError(f"only {len(made)} held-out files have {args.prompt_tokens} tokens: lower --count")
    return made
