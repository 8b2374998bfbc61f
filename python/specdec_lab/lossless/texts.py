"""Texts of the decoding loop with and without speculation, token by token: greedy, and seeded under rule ``match``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specdec_kernels import ChainRule, Sampling, TreeRule
from specdec_loop.datastore import Datastore
from specdec_loop.drafters import Drafter
from specdec_loop.generation import generate
from specdec_loop.methods import METHODS, DrafterAssets

from .models import Pair, load, rows

WITHIN_ROUNDING = 1e-3  # two logits of a float32 model this close may change places with the shape of a batch
BATCH = 16
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
        seconds: of a processor.
        reason: why the method could not run; empty where it did.
        drafts: offered in all texts; where there are none, nothing was tested.
    """

    method: str
    prompts: int
    tokens: int
    different: int
    by_rounding: int
    step: float
    seconds: float = 0.0
    reason: str = ""
    drafts: int = 0

    @property
    def passed(self) -> bool:
        """Whether drafts were made, and only rounding in the model made a difference; also where it could not run."""
        return bool(self.reason) or (self.drafts > 0 and self.different == self.by_rounding)

    def row(self) -> dict[str, Any]:
        """For a JSON file."""
        return {**asdict(self), "passed": self.passed}


def written(pair: Pair, count: int, length: int = 12) -> list[list[int]]:
    """Prompts that the target wrote itself, by sampling after the given ones."""
    given = (pair.prompts * count)[:count]
    sampling = Sampling.full(count, temperature=1.0)
    texts = generate(pair.target, None, given, sampling=sampling, seed=17, max_new_tokens=length, stop=()).tokens
    return [prompt + text for prompt, text in zip(given, texts, strict=True)]


@dataclass(frozen=True)
class Job:
    """One method of the loop that is to be compared with plain decoding.

    Attributes:
        target: folder, as `models.load` takes it.
        draft: likewise.
        heads: folder of folders with heads.
        method: of `specdec_loop.methods`.
        rule: that verifies.
        mode: "greedy" or "seeded".
        prompts: how many, written by the target.
        length: tokens of a text.
    """

    target: str
    draft: str
    heads: str
    method: str
    rule: ChainRule | TreeRule
    mode: str
    prompts: int
    length: int

    def run(self) -> Texts:
        """Run it."""
        started, name = time.process_time(), f"{self.method}, {self.rule}, {self.mode}"
        pair = load(self.target, self.draft)
        prompts = _written(self.target, self.draft, self.prompts)
        assets = DrafterAssets(
            pair.target, heads=Path(self.heads).joinpath, load_draft=lambda: pair.draft,
            load_store=lambda: Datastore.build(prompts),
        )  # fmt: skip
        try:
            drafter = METHODS[self.method].make(assets)
        except (OSError, ValueError, RuntimeError) as error:  # heads that are not there, or of another target
            return Texts(name, 0, 0, 0, 0, 0.0, 0.0, str(error).strip().splitlines()[0])
        plain = _plain(self.target, self.draft, self.prompts, self.length, self.mode)
        found = compare(pair, prompts, plain, drafter, self.rule, self.mode, name)
        found.seconds = round(time.process_time() - started, 2)
        return found


def jobs(target: str, draft: str, heads: str, prompts: int, length: int) -> Iterator[Job]:
    """Every method of the loop greedily, and with seeds where the text itself is kept."""
    for name, method in METHODS.items():
        if name == "plain":
            continue
        cases: list[tuple[ChainRule | TreeRule, str]] = [(method.rule, "greedy")]
        cases += [(method.rule, "seeded")] * method.keeps_the_text
        cases += [("greedy", "greedy")] * (name == "draft-model")
        for rule, mode in cases:
            yield Job(target, draft, heads, name, rule, mode, prompts, length)


@cache
def _written(target: str, draft: str, count: int) -> list[list[int]]:
    return written(load(target, draft), count)


@cache
def _plain(target: str, draft: str, count: int, length: int, mode: str) -> list[list[int]]:
    return texts_of(load(target, draft), None, _written(target, draft, count), length, mode, "match")[0]


def compare(
    pair: Pair, prompts: list[list[int]], plain: list[list[int]], drafter: Drafter | None,
    rule: ChainRule | TreeRule, mode: str,
    name: str,
) -> Texts:  # fmt: skip
    """Texts of one drafter beside the plain ones."""
    texts, steps, drafts = texts_of(pair, drafter, prompts, len(plain[0]), mode, rule)
    different = by_rounding = 0
    for prompt, a, b in zip(prompts, plain, texts, strict=True):
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if place is not None:
            different += 1
            by_rounding += mode == "greedy" and _gap(pair, prompt + a[:place]) < WITHIN_ROUNDING
    tokens = sum(len(text) for text in texts)
    return Texts(name, len(prompts), tokens, different, by_rounding, tokens / max(steps, 1), drafts=drafts)


def texts_of(
    pair: Pair, drafter: Drafter | None, prompts: list[list[int]], length: int, mode: str, rule: ChainRule | TreeRule
) -> tuple[list[list[int]], int, int]:
    """(texts, steps, drafts); the seed of a text does not depend on the drafter."""
    texts: list[list[int]] = []
    steps = drafts = 0
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        filters: Any = {"temperature": 0.0} if mode == "greedy" else SEEDED
        done = generate(
            pair.target, drafter, batch, sampling=Sampling.full(len(batch), **filters), seed=first, rule=rule,
            max_new_tokens=length, stop=(),
        )  # fmt: skip
        texts += done.tokens
        steps += sum(statistics.steps for statistics in done.statistics)
        drafts += sum(sum(statistics.drafted) for statistics in done.statistics)
    return texts, steps, drafts


def _gap(pair: Pair, text: list[int]) -> float:
    best = rows(pair.target, [text])[0].topk(2).values
    return float(torch.diff(best).abs())
