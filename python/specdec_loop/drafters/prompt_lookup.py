"""Prompt lookup: what followed when the last few tokens stood in the text before."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_kernels import Sampling

from ..sequences import Sequences
from .base import Draft, Drafter, Part, copies


class PromptLookup(Drafter):
    """Copies from behind the last earlier occurrence of the longest n-gram that ends the text.

    A copy that reaches the end of the text goes on with itself, as in LZ77: a text that repeats with period d is
    continued with period d, however short its repetition so far.
    """

    def __init__(self, longest: int = 4, shortest: int = 1, *, factor: float = 3.0) -> None:
        """Look for n-grams of these lengths, the longest first.

        Args:
            longest: most tokens of an n-gram.
            shortest: fewest.
            factor: a match of n tokens is trusted for ``factor * n`` drafts: short ones promise less.

        Raises:
            ValueError: unless ``1 <= shortest <= longest`` and ``factor >= 1``.
        """
        if not 1 <= shortest <= longest or not factor >= 1:
            raise ValueError(
                f"PromptLookup: 1 <= shortest <= longest and factor >= 1 expected, got {shortest}, {longest}, {factor}"
            )
        self.longest, self.shortest, self.factor = longest, shortest, factor

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Nothing of the texts is read yet."""
        self._read = [0] * sequences.batch
        # n-gram: where its last one was left
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in sequences.rows]

    def join(self, sequences: Sequences, parts: Sequence[Part]) -> None:
        """Take what was read."""
        self._read = [n for part in parts for n in part.items(part.drafter._read)]
        self._after = [places for part in parts for places in part.items(part.drafter._after)]

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """Read what is new in each text, then copy."""
        drafts = []
        for b, row in enumerate(sequences.rows):
            after = self._after[b]
            for place in range(self._read[b], len(row)):
                for n in range(self.shortest, min(self.longest, place) + 1):
                    after[tuple(row[place - n : place])] = place
            self._read[b] = len(row)
            place, matched = self._found(row, after)
            budget = int(min(length, self.factor * matched)) if matched else 0
            copied = row[place : place + budget]
            while copied and len(copied) < budget:
                copied.append(copied[place - len(row)])
            drafts.append(copied)
        return copies(drafts, sequences.tokens.device)

    def _found(self, row: list[int], after: dict[tuple[int, ...], int]) -> tuple[int, int]:
        """Where to copy from, and how many tokens match; the end where none do."""
        for n in range(min(self.longest, len(row)), self.shortest - 1, -1):
            if (place := after.get(tuple(row[-n:]))) is not None:
                return place, n
        return len(row), 0
