"""Every method beside plain decoding and transformers' own generate, on prompts that no model here was trained on."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from . import datastore
from .compare import available, compare, prompts_of
from .loading import Models, add_model_arguments
from .measure import RIVALS
from .report import new_console, write_chart, write_json

FOLDER = Path("build/demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long it may take, and where the numbers go."""
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument("--count", type=int, default=2, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="each case is given its median")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where demo.json and demo.png go")
    parser.set_defaults(batch=[1], prompts=None, prompt_tokens=64, draft_length=None)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Build the datastore where there is none, measure, print, draw."""
    console, models = new_console(), Models(args)
    if not args.datastore.exists():
        args.datastore.parent.mkdir(parents=True, exist_ok=True)
        datastore.build(datastore.training_files(), models.tokenizer).save(args.datastore)
    started = time.perf_counter()
    methods = available(models, console)
    rivals = [r for r in RIVALS if r != "transformers assisted" or "draft-model" in methods]
    rows = compare(models, prompts_of(models, args), methods, rivals, args, console)
    settings = {"temperature": args.temperature, "count": args.count, "max_new_tokens": args.max_new_tokens}
    write_json(rows, settings, args.folder / "demo.json")
    write_chart(rows, args.folder / "demo.png")
    console.print(
        f"{time.perf_counter() - started:.0f} s; all numbers in {args.folder}/demo.json, chart in demo.png",
        highlight=False,
    )
