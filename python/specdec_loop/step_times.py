"""The time of a step by the tokens of its forward, measured step by step: the `cost` of `allocate_drafts`."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

import torch
from torch import Tensor

from .draft_length import SLOWEST


class StepTimes:
    """A line through the steps of late, which varied around the number of tokens that matters now."""

    def __init__(self, memory: int = 64) -> None:
        """Forget what lies more than `memory` steps back.

        Raises:
            ValueError: fewer than 2.
        """
        if not isinstance(memory, int) or memory < 2:
            raise ValueError(f"memory must be an int >= 2, got {memory!r}")
        self._steps: deque[tuple[int, float]] = deque(maxlen=memory)

    def note(self, tokens: int, seconds: float) -> None:
        """A step ran so many tokens and took so long, drafting aside."""
        self._steps.append((tokens, seconds))

    def table(self, batch: int, budget: int) -> Tensor | None:
        """Times of steps of `batch` tokens and 0 to `budget` drafts behind them.

        Returns:
            float32 ``[budget + 1]``, which never falls; None while all steps had the same number of tokens.

        Example:
            >>> from specdec_loop import StepTimes
            >>> times = StepTimes()
            >>> times.note(4, 0.010)
            >>> times.note(8, 0.012)
            >>> times.table(4, 2)
            tensor([0.0100, 0.0105, 0.0110])
        """
        counts, seconds = [n for n, _ in self._steps], [spent for _, spent in self._steps]
        if len(set(counts)) < 2:
            return None
        most = SLOWEST * median(seconds)
        centre, time = fmean(counts), fmean(min(spent, most) for spent in seconds)
        rise = sum((n - centre) * min(spent, most) for n, spent in zip(counts, seconds, strict=True))
        # A token takes no more than its share of a step: so the line stays positive.
        slope = min(max(rise / sum((n - centre) ** 2 for n in counts), 0.0), time / centre)
        return time + slope * (torch.arange(batch, batch + budget + 1, dtype=torch.float32) - centre)
