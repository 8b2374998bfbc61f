"""Races that draw drafts: their distribution and the names of their noise, for as many rows as a request has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import RngKey, SampleResult, Sampling, sample

from ..sequences import OffsetTable, Sequences
from .base import COLD


class Race:
    """Draws from the rows of a batch; what stays the same from step to step is made once."""

    def __init__(
        self, distribution: Sampling, sequences: Sequences, offsets: Sequence[int], *, has_step: bool = False
    ) -> None:
        """Lay the rows out.

        Args:
            distribution: of each request.
            sequences: names the noise.
            offsets: of each row of a request: how much further ahead its token is than that of the first.
            has_step: whether the noise is that of one step, as for drafts that are drawn from their own distribution.
        """
        self.rows, self.has_step = len(offsets), has_step
        self.distribution = repeated(distribution, self.rows)
        self._seed = spread(sequences.rng().seed, self.rows)
        self._offsets = torch.tensor(offsets, device=self._seed.device)
        behind = sequences.first + self._offsets.repeat(sequences.batch)
        self._step = OffsetTable(torch.zeros_like(behind), sequences.room)
        self._place = OffsetTable(behind, sequences.room)

    def rng(self, sequences: Sequences, ahead: int = 0) -> RngKey:
        """Names the random numbers of rows whose first token is so far from the next one."""
        place = sequences.place(ahead)
        if place is not None:
            return RngKey(self._seed, self._place[place], self._step[sequences.steps] if self.has_step else None)
        now = sequences.rng(ahead)
        position = now.position if self.rows == 1 else (now.position[:, None] + self._offsets).flatten()
        step = spread(now.step, self.rows) if self.has_step and now.step is not None else None
        return RngKey(self._seed, position, step)


class PositionRaces:
    """A race for each position of drafts that are predicted all at once."""

    def __init__(self, distribution: Sampling, sequences: Sequences, *, is_drawn: bool = False) -> None:
        """Race in these distributions.

        Args:
            distribution: of each request.
            sequences: names the noise.
            is_drawn: drafts are drawn from their own distribution; else the noise is the target's.
        """
        self.distribution, self.is_drawn = distribution, is_drawn
        self._races: dict[int, Race] = {}  # of so many positions

    def best(
        self, logits: Tensor, sequences: Sequences, count: int = 1, *, token_map: Tensor | None = None
    ) -> SampleResult:
        """The `count` best ids of each row of ``[batch, positions, draft_vocab]``, all rows in one axis.

        Their log-probabilities are those at temperature 1.
        """
        positions = logits.shape[1]
        if positions not in self._races:
            self._races[positions] = Race(self.distribution, sequences, range(positions), has_step=self.is_drawn)
        race = self._races[positions]
        return sample(
            logits.flatten(0, 1),
            sampling=race.distribution,
            rng=race.rng(sequences),
            purpose="draft" if self.is_drawn else "target",
            num_samples=count,
            token_map=token_map,
            logprobs="raw",
        )


def repeated(distribution: Sampling, count: int) -> Sampling:
    """The distribution of so many rows a request, one after the other."""
    return Sampling(*(None if part is None else spread(part, count) for part in distribution))


def spread(parts: Tensor, count: int) -> Tensor:
    """Repeat a per-request tensor for each of its rows."""
    return parts if count == 1 else parts[:, None].repeat(1, count).flatten()


def with_point_masses(distribution: Sampling) -> Sampling:
    """The distribution of what `with_runners_up` races: at a temperature below `COLD` its winner is a point mass."""
    if distribution.temperature is None:
        return distribution
    return distribution._replace(temperature=distribution.temperature.masked_fill(distribution.temperature < COLD, 0.0))


def with_runners_up(distribution: Sampling, sequences: Sequences) -> Sampling:
    """Sampling for a race whose runners-up are wanted too; a greedy race gives the largest logits in order."""
    device = sequences.tokens.device
    if distribution.temperature is None:
        return distribution
    temperature = distribution.temperature.to(device)
    is_argmax = temperature < COLD
    return Sampling(
        temperature=temperature.clamp(min=COLD),
        top_k=None if distribution.top_k is None else torch.where(is_argmax, 0, distribution.top_k),
        top_p=None if distribution.top_p is None else torch.where(is_argmax, 1.0, distribution.top_p),
        min_p=None if distribution.min_p is None else torch.where(is_argmax, 0.0, distribution.min_p),
    )
