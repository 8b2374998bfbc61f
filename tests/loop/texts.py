"""Texts of a run beside texts of another: equal, but where rounding alone may decide."""

from __future__ import annotations

import random
from typing import Any

import torch
from models import VOCAB
from torch import Tensor

from specdec_kernels import RngKey, Sampling, race_noise
from specdec_loop.drafters import Draft, Drafter
from specdec_loop.sequences import Sequences
from specdec_loop.stops import Stops

TIE = 1e-4  # two best scores this close may change places where the logits differ by rounding
LENGTHS = [1, 9, 2, 14, 1, 5, 3]  # of a ragged batch: one token, several, and different ones side by side


def prompts(count: int = 7, vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    """Random prompts in which n-grams come back."""
    rng = random.Random(seed)
    return [[rng.choice([rng.randrange(1, vocab), 7, 8]) for _ in range(n)] for n in LENGTHS[:count]]


def scores(network: Any, context: list[int], sampling: Sampling, b: int, seed: int) -> Tensor:
    """The score that the drawn token maximises: the logit, or the race of the seeded draw."""
    logits = network(torch.tensor([context])).logits[0, -1].double()
    temperature = 0.0 if sampling.temperature is None else float(sampling.temperature[b])
    if temperature == 0:
        return logits
    rng = RngKey(torch.tensor([seed]), torch.tensor([len(context)]))
    return logits / temperature - race_noise(rng, torch.arange(len(logits)))[0].double().log()


def assert_same(
    got: list[list[int]],
    want: list[list[int]],
    network: Any,
    starts: list[list[int]],
    sampling: Sampling,
    seed: int = 0,
) -> None:
    """The same texts; a difference passes only at two scores that rounding may exchange, and is printed."""
    assert len(got) == len(want)
    for b, (mine, other) in enumerate(zip(got, want, strict=True)):
        if mine == other:
            continue
        at = next((i for i, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y), None)
        assert at is not None, f"request {b}: {len(mine)} tokens, not {len(other)}"
        best = scores(network, starts[b] + mine[:at], sampling, b, seed + b).topk(2)
        gap = float(best.values[0] - best.values[1])
        assert gap <= TIE and {mine[at], other[at]} == set(best.indices.tolist()), f"request {b}, token {at}: {gap:.3g}"
        print(f"request {b}, token {at}: {mine[at]} or {other[at]}, whose scores differ by {gap:.1e}")


class Scripted(Drafter):
    """Drafts what it is told, from texts known beforehand; `shift` makes every token of it wrong."""

    rules = (*Drafter.rules,)

    def __init__(self, texts: list[list[int]], shift: int = 0) -> None:
        self.texts, self.shift = texts, shift

    def draft(self, sequences: Sequences, length: int) -> Draft:
        rows = []
        for row, whole in zip(sequences.rows, self.texts, strict=True):
            ahead = [(x + self.shift) % VOCAB for x in whole[len(row) : len(row) + length]]
            rows.append(ahead + [-1] * (length - len(ahead)))
        return Draft(torch.tensor(rows))


def text_of(*rows: list[int], limit: int = 20) -> Sequences:
    """Texts to draft for."""
    width = max(map(len, rows))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    every = {"limits": [limit] * len(lengths), "stops": [Stops([])] * len(lengths)}
    return Sequences(padded, lengths, seed=torch.zeros_like(lengths), overhang=8, **every)
