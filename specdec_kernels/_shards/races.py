"""Races over a vocabulary that several ranks hold: each sends the best of its own ids, all pick the same winner."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _random, _rows
from .._types import RngKey
from .group import Shards

_INF = float("inf")


class Winner(NamedTuple):
    """Best ids of each row, best first."""

    ids: Tensor  # int64 [rows, count], -1 where there are fewer competitors
    logit: Tensor  # float32 [rows, count]


def noise(shards: Shards, rng: RngKey, purpose: int, lane: Tensor | None = None) -> Tensor:
    """Noise [rows, widest] of this rank's ids."""
    return _random.vocab_noise(rng, purpose, lane, shards.widest, first=shards.first)


def corrected(weight: Tensor, noise: Tensor) -> Tensor:
    """Scores of a draw from weights [rows, columns]."""
    return _rows.race_scores(_random.log(weight.clamp(min=_rows.TINY)), weight >= _rows.TINY, noise)


def best(score: Tensor, ids: Tensor, logits: Tensor, count: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's message: scores, ids and logits of its best, [rows, count], ties to the lowest id; -1 is none."""
    by_id = ids.argsort(stable=True)
    top = by_id[score[:, by_id].sort(dim=1, descending=True, stable=True).indices[:, :count]]
    score = score.gather(1, top)
    top_ids = torch.where(score > -_INF, ids[top], -1)
    short = (0, count - top.shape[1])
    pad = torch.nn.functional.pad
    return pad(score, short, value=-_INF), pad(top_ids, short, value=-1).int(), pad(logits.gather(1, top), short)


def winner(score: Tensor, ids: Tensor, logit: Tensor) -> Winner:
    """The best of all ranks' messages [ranks, rows, count]."""
    count = score.shape[2]
    score, ids, logit = (part.permute(1, 0, 2).flatten(1) for part in (score, ids.long(), logit))
    by_id = ids.argsort(dim=1, stable=True)
    score = score.gather(1, by_id)
    top = by_id.gather(1, score.sort(dim=1, descending=True, stable=True).indices[:, :count])
    return Winner(ids.gather(1, top), logit.gather(1, top))
