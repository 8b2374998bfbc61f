"""Decoding inside a JSON schema: what drafts inside and outside of the grammar bring, and what masks cost.

    python -m bench.grammar [--rounds 5] [--threads 1]

Prints tokens a step and tokens a second of the repository's models, as medians of rounds that alternate. "late": masks
are filled after the target's forward, not while it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.machine import machine
from specdec_kernels import Sampling
from specdec_loop import GrammarCompiler, generate
from specdec_loop.cli.loading import Models
from specdec_loop.grammar import LIBRARIES, DraftGrammars
from specdec_loop.methods import METHODS

PROMPT = '{"name": "tokenizer", "kind": "module", "public": true, "lines": 120, "imports": ["os", "sys"]}\n'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
        "kind": {"enum": ["module", "class", "function"]},
        "public": {"type": "boolean"},
        "lines": {"type": "integer", "minimum": 0, "maximum": 9999},
        "imports": {"type": "array", "items": {"enum": ["os", "sys", "re", "json"]}, "minItems": 4, "maxItems": 8},
    },
    "required": ["name", "kind", "public", "lines", "imports"],
    "additionalProperties": False,
}
CASES = ["plain", "suffix", "draft-model", "mtp", "mtp-tree"]


class Late:
    """An executor that works when the result is asked for."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Any:
        return mock.Mock(result=lambda: work(*args))


class Outside(DraftGrammars):
    """Lets drafters draft as without a grammar."""

    def __init__(self, matchers: Any, vocab: int) -> None:
        super().__init__([None for _ in matchers], vocab)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    models = Models(
        argparse.Namespace(
            device="cpu", target=None, draft=None, heads=None, threads=args.threads, dtype="float32", draft_dtype=None,
            datastore=Path("none"), draft_length=None,
        )
    )  # fmt: skip
    ids = models.encode(PROMPT * 2, 160)
    ways: dict[str, Callable[[], Any]] = {
        "inside": contextlib.nullcontext,
        "outside": lambda: mock.patch("specdec_loop.grammar.matching.DraftGrammars", Outside),
        "late": lambda: mock.patch("specdec_loop.grammar.matching.ThreadPoolExecutor", return_value=Late()),
    }
    print(machine(), f"torch {torch.__version__}, {args.threads} threads")
    for library in LIBRARIES:
        compiler = GrammarCompiler(models.tokenizer, models.target.config.vocab_size, [0], library=library)
        grammar = compiler.json_schema(SCHEMA)
        for name in CASES:
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for _ in range(args.rounds):
                for way, patched in ways.items():
                    with patched():
                        found[way].append(measure(models, name, ids, grammar))
            medians = {
                way: [statistics.median(column) for column in zip(*runs, strict=True)] for way, runs in found.items()
            }
            cells = [f"{way} {a:.2f} a step, {b:.0f} a second" for way, (a, b) in medians.items()]
            print(f"{library:10} {name:12} {'; '.join(cells)}", flush=True)


def measure(models: Models, name: str, ids: list[int], grammar: Any) -> tuple[float, float]:
    """Tokens a step and a second over four seeded requests, one after the other."""
    tokens = steps = 0
    begun = time.perf_counter()
    for seed in range(4):
        method = METHODS[name]
        done = generate(
            models.target, models.drafter(name), [ids], sampling=Sampling.full(1, temperature=0.7), seed=seed,
            rule=method.rule, max_new_tokens=160, draft_length=models.draft_length(name, 1), grammar=grammar,
        )  # fmt: skip
        tokens, steps = tokens + len(done.tokens[0]), steps + done.statistics[0].steps
    return tokens / steps, tokens / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
