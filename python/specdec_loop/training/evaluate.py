"""What the drafters are worth: accepted tokens a step on held-out prompts, `python -m specdec_loop.training.evaluate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from specdec_kernels import Sampling

from ..drafters import Drafter
from ..generation import generate
from ..zoo import load_drafters, load_target
from . import corpus

SETTINGS = (("greedy", 0.0), ("match", 0.7), ("match", 1.0))
DRAWN = {"EAGLE-1": "recursive", "draft model": "ratio", "MTP": "ratio"}  # rules of drafts drawn from the drafter's law


def measure(
    target: Any, drafter: Drafter | None, prompts: torch.Tensor, rule: str, temperature: float, tokens: int
) -> dict[str, float]:
    """Tokens a step, and the share of distinct 4-grams in the texts."""
    sampling = Sampling.full(len(prompts), temperature=temperature)
    result = generate(
        target, drafter, prompts, sampling=sampling, rule=rule, max_new_tokens=tokens, seed=7, draft_length=4, stop=()
    )
    steps = sum(len(request.accepted) for request in result.statistics)
    grams = [tuple(text[i : i + 4]) for text in result.tokens for i in range(len(text) - 3)]
    return {"tokens a step": sum(map(len, result.tokens)) / steps, "distinct 4-grams": len(set(grams)) / len(grams)}


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """Methods downwards, settings across."""
    settings = list(dict.fromkeys(s for row in rows.values() for s in row))
    lines = ["| tokens a step | " + " | ".join(settings) + " |", "|---" * (1 + len(settings)) + "|"]
    for name, row in rows.items():
        cells = (f"{row[s]['tokens a step']:.2f}" if s in row else "" for s in settings)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="specdec_loop.training.evaluate", description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("python/models"), help="folder of target and drafters")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    target, tokenizer = load_target(args.models / "target")
    texts = corpus.read([p for p in corpus.sources() if corpus.is_held_out(p)])
    prompts = corpus.even_windows(corpus.encode(tokenizer, texts), args.prompts, args.prompt_tokens)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    drafters: dict[str, Drafter | None] = {"plain": None, **load_drafters(target, args.models)}
    for name, drafter in track(list(drafters.items()), "measuring"):
        settings = [*SETTINGS, *((DRAWN[name], t) for _, t in SETTINGS[1:] if name in DRAWN)]
        rows[name] = {
            f"{rule}, {temperature:g}": measure(target, drafter, prompts, rule, temperature, args.new_tokens)
            for rule, temperature in settings
        }
    (args.models / "acceptance.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
