"""The vocabulary that rows range over: on one device, or cut into shards (`_shards`). Plain PyTorch.

The references of `sample`, `verify_chain` and `verify_tree` are written for both. Whatever sums over ids, or looks for
the best of them, asks the vocabulary; on one device its exchanges give back what was put in, as of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import _random, _rows
from ._rows import Distribution, Parameters
from ._types import RngKey

_INF = float("inf")


class Table(NamedTuple):
    """This rank's part of some rows, and how they are sampled."""

    logits: Tensor  # float32 [rows, columns], -inf where not allowed; the same shape on every rank
    parameter: Parameters  # each [rows]


class Vocabulary:
    """All ids, on one device."""

    def __init__(self, size: int) -> None:
        """`first` .. `end` are this rank's ids; rows have `widest` columns on every rank."""
        self.ranks, self.first, self.end, self.size, self.widest = 1, 0, size, size, size

    def columns(self, device: torch.device) -> Tensor:
        """int64 [widest]: the id of each column; a padded column holds -inf and never counts."""
        return torch.arange(self.first, self.first + self.widest, device=device)

    def pad(self, logits: Tensor) -> Tensor:
        """Rows as float32, as wide as those of the widest rank."""
        return torch.nn.functional.pad(logits.float(), (0, self.widest - logits.shape[-1]), value=-_INF)

    def by_id(self, logits: Tensor, token_map: Tensor | None) -> Tensor:
        """Draft rows [rows, columns] by target id; NaN, which makes them bad, where the map names another rank's id.

        Columns without a target id count in a row's mass but lie behind the ids.
        """
        if token_map is None:
            return self.pad(logits)
        width = logits.shape[1]
        ids = token_map.long()
        mine = (ids >= self.first) & (ids < self.end)
        misplaced = ((ids >= 0) & (ids < self.size) & ~mine).any()
        place = torch.where(mine, ids - self.first, self.widest + torch.arange(width, device=ids.device))
        out = logits.new_full((len(logits), self.widest + max(self.widest, width)), -_INF, dtype=torch.float32)
        out[:, place] = logits.float()
        return torch.where(misplaced, float("nan"), out)

    def by_kept_id(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Draft rows of candidates [rows, k] as rows over this rank's ids."""
        mine = (ids >= self.first) & (ids < self.end)
        place = torch.where(mine, ids - self.first, self.widest).long()
        out = logits.new_full((len(logits), self.widest + 1), -_INF, dtype=torch.float32)
        return out.scatter(1, place, logits.float())[:, : self.widest]

    def noise(self, rng: RngKey, purpose: int, lane: Tensor | None = None) -> Tensor:
        """Noise [rows, widest] of this rank's ids."""
        return _random.vocab_noise(rng, purpose, lane, self.widest, first=self.first)

    def send(self, *fields: Tensor) -> Callable[[], list[Tensor]]:
        """Start one exchange; the function returned gives each field of all ranks, [ranks, ...]."""
        return lambda: [field[None] for field in fields]

    def sum(self, *fields: Tensor) -> list[Tensor]:
        """Sums over the ranks, in their order, in one exchange."""
        return [added(field) for field in self.send(*fields)()]

    def distributions(
        self, tables: list[Table], *more: Tensor
    ) -> Callable[[], tuple[list[Distribution], list[Tensor]]]:  # fmt: skip
        """Start to look at rows; the function returned gives their distributions, and `more` of all ranks.

        `Distribution.argmax` is an id of the whole vocabulary, what has columns is this rank's.
        """
        found = [_rows.distribution(table.logits, table.parameter) for table in tables]
        return lambda: (found, [field[None] for field in more])


def added(parts: Tensor) -> Tensor:
    """Sum over the ranks [ranks, ...], in their order: the same bits everywhere."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class Winner(NamedTuple):
    """Best ids of each row, best first."""

    ids: Tensor  # int64 [rows, count], -1 where there are fewer competitors
    logit: Tensor  # float32 [rows, count]


def best(score: Tensor, ids: Tensor, logits: Tensor, count: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's message: scores, ids and logits of its best, [rows, count], ties to the lowest id; -1 is none.

    Without a count one of each row; `ids` must then rise.
    """
    if count is None:
        count, top = 1, score.argmax(1, keepdim=True)
    else:
        by_id = ids.argsort(stable=True)
        top = by_id[score[:, by_id].sort(dim=1, descending=True, stable=True).indices[:, :count]]
    score = score.gather(1, top)
    short, pad = (0, count - top.shape[1]), torch.nn.functional.pad
    found = torch.where(score > -_INF, ids[top], -1)
    return pad(score, short, value=-_INF), pad(found, short, value=-1).int(), pad(logits.gather(1, top), short)


def winner(score: Tensor, ids: Tensor, logit: Tensor) -> Winner:
    """The best of all ranks' messages [ranks, rows, count]."""
    count = score.shape[2]
    score, ids, logit = (part.permute(1, 0, 2).flatten(1) for part in (score, ids.long(), logit))
    by_id = ids.argsort(dim=1, stable=True)
    score = score.gather(1, by_id)
    top = by_id.gather(1, score.sort(dim=1, descending=True, stable=True).indices[:, :count])
    return Winner(ids.gather(1, top), logit.gather(1, top))
