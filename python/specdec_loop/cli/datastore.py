"""Build the datastore of method rest from text files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import track

from ..datastore import Datastore
from .loading import MODELS, UserError, one_line

CHUNK = 64  # files tokenized at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: input and output files."""
    parser.add_argument("action", choices=("build",))
    parser.add_argument("texts", nargs="*", type=Path, help="files, or folders of them; none: the training corpus")
    parser.add_argument("--suffix", default=".py", help="of the files in a folder")
    parser.add_argument("--tokenizer", type=Path, default=MODELS / "target", help="folder of the target's tokenizer")
    parser.add_argument("--out", type=Path, default=Path("build/datastore.pt"))
    parser.add_argument("--depth", type=int, default=16, help="longest match, a power of two")


def run(args: argparse.Namespace) -> None:
    """Tokenize and sort."""
    import transformers

    paths = list(_files(args.texts, args.suffix)) if args.texts else training_files()
    if not paths:
        raise UserError(f"no file {args.suffix} in {', '.join(map(str, args.texts))}: give others, or --suffix")
    with one_line():
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer, local_files_only=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
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
    for start in track(range(0, len(paths), CHUNK), description="tokenizing", transient=True):
        texts = [p.read_text(encoding="utf-8", errors="replace") for p in paths[start : start + CHUNK]]
        sequences += tokenizer(texts, add_special_tokens=False)["input_ids"]
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
