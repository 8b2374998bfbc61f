"""Races that draw drafts: their law and the names of their noise, for as many rows as a request has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import Noise, Sampling

from ..text import Counted, Text
from .base import COLD


class Race:
    """Rows of a request that are drawn from under one law; what stays the same from step to step is made once."""

    def __init__(self, law: Sampling, text: Text, offsets: Sequence[int], *, has_step: bool = False) -> None:
        """Lay the rows out.

        Args:
            law: of each request.
            text: names the noise.
            offsets: of each row of a request: how much further ahead its token is than that of the first.
            has_step: whether the noise is that of one step, as for drafts that are drawn from their own law.
        """
        self.rows, self.has_step = len(offsets), has_step
        self.law = repeated(law, self.rows)
        self._seed = spread(text.noise().seed, self.rows)
        self._offsets = torch.tensor(offsets, device=self._seed.device)
        behind = text.first + self._offsets.repeat(text.batch)
        self._step, self._place = Counted(torch.zeros_like(behind), text.room), Counted(behind, text.room)

    def noise(self, text: Text, ahead: int = 0) -> Noise:
        """Names the random numbers of rows whose first token is so far from the next one."""
        place = text.place(ahead)
        if place is not None:
            return Noise(self._seed, self._place[place], self._step[text.steps] if self.has_step else None)
        now = text.noise(ahead)
        position = now.position if self.rows == 1 else (now.position[:, None] + self._offsets).flatten()
        step = spread(now.step, self.rows) if self.has_step and now.step is not None else None
        return Noise(self._seed, position, step)


def repeated(law: Sampling, count: int) -> Sampling:
    """The law of so many rows a request, one after the other."""
    return Sampling(*(None if part is None else spread(part, count) for part in law))


def spread(parts: Tensor, count: int) -> Tensor:
    """What belongs to each request, for so many rows of it."""
    return parts if count == 1 else parts[:, None].repeat(1, count).flatten()


def with_runners_up(law: Sampling, text: Text) -> Sampling:
    """The law for a race whose runners-up are wanted too: where it is an argmax, the largest logits in order."""
    device = text.tokens.device
    if law.temperature is None:
        return law
    temperature = law.temperature.to(device)
    is_argmax = temperature < COLD
    return Sampling(
        temperature=temperature.clamp(min=COLD),
        top_k=None if law.top_k is None else torch.where(is_argmax, 0, law.top_k),
        top_p=None if law.top_p is None else torch.where(is_argmax, 1.0, law.top_p),
        min_p=None if law.min_p is None else torch.where(is_argmax, 0.0, law.min_p),
    )
