"""Texts that a drafter takes part in, beside those of plain decoding."""

from __future__ import annotations

import functools
from typing import Any

import torch
from models import model
from texts import assert_same, prompts

from specdec_kernels import Sampling
from specdec_loop.drafters import Drafter
from specdec_loop.generation import generate

TOKENS, SEED = 12, 3
MIXED = Sampling(torch.tensor([0.8, 0.0, 1.3, 0.5, 0.0, 1.0, 0.7]), top_p=torch.tensor([1, 0.9, 0.9, 1, 0.5, 1, 1.0]))
RUNS = [(rule, batch) for rule in ("match", "greedy") for batch in (1, 7)]


def decode(target: Any, drafter: Drafter | None, rule: str, batch: int, draft_length: int = 3) -> Any:
    """Seven prompts have lengths of their own; under match some requests are sampled."""
    sampling = Sampling.full(batch, temperature=0.0)
    if rule == "match":
        sampling = Sampling(*(None if x is None else x[:batch] for x in MIXED))
    options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": TOKENS, "seed": SEED}
    return generate(target, drafter, prompts(batch), rule=rule, draft_length=draft_length, **options), sampling


@functools.cache
def plain(target: Any, rule: str, batch: int) -> list[list[int]]:
    return decode(target, None, rule, batch)[0].tokens


def assert_texts(*drafters: Drafter, target: Any = None) -> None:
    """Under match and greedy, of one request and of a ragged batch, they are those of plain decoding."""
    target = target or model()
    for drafter in drafters:
        accepted = 0
        for rule, batch in RUNS:
            result, sampling = decode(target, drafter, rule, batch)
            assert_same(result.tokens, plain(target, rule, batch), target, prompts(batch), sampling, SEED)
            accepted += sum(sum(row.accepted) for row in result.statistics)
        assert accepted > 0  # or no draft was ever gone on from
