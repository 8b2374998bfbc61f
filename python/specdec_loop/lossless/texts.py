"""Texts of the decoding loop with and without speculation, token by token: greedy, and seeded under rule ``match``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from specdec_kernels import Sampling

from ..drafters import Drafter, DraftModel, Lookahead, PromptLookup, SuffixDecoding
from ..generation import generate
from .models import Pair, rows

WITHIN_ROUNDING = 1e-3  # two logits of a float32 model this close may change places with the shape of a batch
BATCH = 8
SEEDED = {"temperature": 0.8, "top_p": 0.95}


@dataclass
class Texts:
    """Texts with speculation beside the same without.

    Attributes:
        method: drafter and rule.
        prompts: how many.
        tokens: compared.
        different: prompts whose texts differ.
        by_rounding: of these, greedy ones where the two best logits at the first difference are within rounding.
        step: mean tokens a step.
    """

    method: str
    prompts: int
    tokens: int
    different: int
    by_rounding: int
    step: float

    @property
    def passed(self) -> bool:
        """Whether only rounding in the model made a difference."""
        return self.different == self.by_rounding

    def row(self) -> dict[str, Any]:
        """For a JSON file."""
        return {**asdict(self), "passed": self.passed}


def written(pair: Pair, count: int, length: int = 12) -> list[list[int]]:
    """Prompts that the target wrote itself, by sampling after the given ones."""
    given = (pair.prompts * count)[:count]
    sampling = Sampling.full(count, temperature=1.0)
    texts = generate(pair.target, None, given, sampling=sampling, seed=17, max_new_tokens=length, stop=()).tokens
    return [prompt + text for prompt, text in zip(given, texts, strict=True)]


def compare(pair: Pair, prompts: list[list[int]], length: int) -> list[Texts]:
    """Every drafter and lossless rule of the loop, on batches of prompts."""
    drafters: list[tuple[str, Drafter, tuple[str, ...]]] = [
        ("draft model", DraftModel(pair.draft), ("greedy", "ratio", "block", "match")),
        ("prompt lookup", PromptLookup(), ("greedy", "match")),
        ("suffix decoding", SuffixDecoding(), ("greedy", "match")),
        ("lookahead", Lookahead(), ("greedy", "match")),
    ]
    plain = {mode: _texts(pair, None, prompts, length, mode, "match")[0] for mode in ("greedy", "seeded")}
    found = []
    for name, drafter, rules in drafters:
        for rule in rules:
            for mode in ("greedy", "seeded") if rule == "match" else ("greedy",):
                texts, steps = _texts(pair, drafter, prompts, length, mode, rule)
                found.append(_judged(f"{name}, {rule}, {mode}", pair, prompts, plain[mode], texts, steps, mode))
    return found


def _texts(
    pair: Pair, drafter: Drafter | None, prompts: list[list[int]], length: int, mode: str, rule: str
) -> tuple[list[list[int]], int]:
    """(texts, steps); a text has the same seed whoever drafts."""
    texts: list[list[int]] = []
    steps = 0
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        filters: Any = {"temperature": 0.0} if mode == "greedy" else SEEDED
        done = generate(
            pair.target, drafter, batch, sampling=Sampling.full(len(batch), **filters), seed=first, rule=rule,
            max_new_tokens=length, stop=(),
        )  # fmt: skip
        texts += done.tokens
        steps += sum(statistics.steps for statistics in done.statistics)
    return texts, steps


def _judged(
    method: str, pair: Pair, prompts: list[list[int]], plain: list[list[int]], texts: list[list[int]], steps: int,
    mode: str,
) -> Texts:  # fmt: skip
    different = by_rounding = 0
    for prompt, a, b in zip(prompts, plain, texts, strict=True):
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if place is not None:
            different += 1
            by_rounding += mode == "greedy" and _gap(pair, prompt + a[:place]) < WITHIN_ROUNDING
    tokens = sum(len(text) for text in texts)
    return Texts(method, len(prompts), tokens, different, by_rounding, tokens / max(steps, 1))


def _gap(pair: Pair, text: list[int]) -> float:
    best = rows(pair.target, [text])[0].topk(2).values
    return float(torch.diff(best).abs())
