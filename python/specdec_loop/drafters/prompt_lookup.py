"""Prompt lookup: what followed when the last few tokens stood in the text before."""

from __future__ import annotations

import torch

from ..text import Text
from .base import Draft, Drafter


class PromptLookup(Drafter):
    """Copies from behind the last earlier occurrence of the longest n-gram that ends the text.

    A copy that reaches the end of the text goes on with itself, as in LZ77: a text that repeats with period d is
    continued with period d, however short its repetition so far.
    """

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        """Look for n-grams of these lengths, the longest first.

        Raises:
            ValueError: unless ``1 <= shortest <= longest``.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"PromptLookup: 1 <= shortest <= longest expected, got {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest

    def draft(self, text: Text, length: int) -> Draft:
        """Match every place of every text at once."""
        tokens, ends = text.tokens[:, : text.longest], text.lengths[:, None]
        place = torch.arange(text.longest, device=tokens.device)  # of an occurrence's last token
        is_same, copied_from = place < ends - 1, torch.zeros_like(ends)
        for n in range(1, self.longest + 1):
            earlier = tokens.roll(n - 1, 1)  # at place i stands token i - n + 1
            is_same = is_same & (place >= n - 1) & (ends >= n) & (earlier == text.last(n)[:, :1])
            latest = torch.where(is_same, place + 1, 0).amax(1, keepdim=True)
            if n >= self.shortest:
                copied_from = torch.where(latest > 0, latest, copied_from)
        period = ends - copied_from
        found = tokens.gather(1, copied_from + torch.arange(length, device=tokens.device) % period)
        return Draft(torch.where(copied_from > 0, found, -1))
