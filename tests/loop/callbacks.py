"""Processors, criteria and streamers for `model.generate`, each strict about how it is called."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor


class Banned:
    """Forbids what the prefix's length and last token say: wrong for any other prefix."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        banned = (ids[:, -1] * 7 + ids.shape[1] * 3 + ids.sum(1)) % 3
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 == banned[:, None], -float("inf"))


class Counting:
    def __init__(self) -> None:
        self.counts = {"calls": [0]}

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.counts["calls"][0] += 1
        return scores


class StopsAt(transformers.StoppingCriteria):
    """Stops rows by what the whole batch holds and by how often it was asked."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.clone())
        others = input_ids[:, -1].roll(1)
        return (len(self.seen) > 3) & ((input_ids[:, -1] + others) % 5 == 0)


class Heard:
    """A streamer that writes down what it is given."""

    def __init__(self) -> None:
        self.columns: list[list[Any]] = []

    def put(self, value: Tensor) -> None:
        self.columns.append(value.tolist())

    def end(self) -> None:
        self.columns.append([])
