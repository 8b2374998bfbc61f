"""Every method beside plain decoding and transformers' own generate, on prompts that no model here was trained on."""

from __future__ import annotations

import argparse
import time

from . import datastore
from .compare import available, compare, prompts_of
from .errors import check_output
from .loading import Models
from .measure import RIVALS
from .report import new_console, write_chart, write_json


def run(args: argparse.Namespace) -> None:
    """Build the datastore where there is none, measure, print, draw."""
    check_output("--folder", args.folder / "demo.json")
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
