"""Build the datastore of method rest from text files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..datastore import Datastore
from .arguments import default_model
from .errors import UserError, check_output, one_line
from .progress import progress

CHUNK = 64  # files tokenized at once


def run(args: argparse.Namespace) -> None:
    """Tokenize and sort."""
    import transformers

    paths = list(_files(args.texts, args.suffix)) if args.texts else training_files()
    if not paths:
        raise UserError(f"no file {args.suffix} in {', '.join(map(str, args.texts))}: give others, or --suffix")
    check_output("--out", args.out)
    folder = args.tokenizer or default_model("--tokenizer", "target")
    with one_line():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        started = time.perf_counter()
        store = build(paths, tokenizer, depth=args.depth)
        store.save(args.out)
    size = args.out.stat().st_size / 2**20
    print(
        f"{args.out}: {len(store)} tokens of {len(paths)} files, {size:.0f} MiB, {time.perf_counter() - started:.1f} s"
    )


def build(paths: list[Path], tokenizer: Any, *, depth: int = 16) -> Datastore:
    """A datastore of files."""
    sequences: list[list[int]] = []
    with progress("tokenizing") as report:
        for start in range(0, len(paths), CHUNK):
            some = paths[start : start + CHUNK]
            texts = [p.read_text(encoding="utf-8", errors="replace") for p in some]
            sequences += tokenizer(texts, add_special_tokens=False)["input_ids"]
            report(start + len(some), len(paths), "files tokenized")
    return Datastore.build(sequences, depth=depth)


def training_files() -> list[Path]:
    """The files that the default models were trained on, without the held-out ones."""
    from .. import corpus

    return [p for p in corpus.sources() if not corpus.is_held_out(p)]


def _files(texts: list[Path], suffix: str) -> Iterator[Path]:
    for path in texts:
        if not path.exists():
            raise UserError(f"there is no file or folder {path}")
        yield from sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]
