"""Suffix decoding: continuations by how often they followed, in this text and in texts before it (Oliaro et al.)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from specdec_kernels import Sampling, SuffixIndex, draft_suffixes

from ..sequences import Sequences
from .base import Draft, Drafter, Part, copies


class SuffixDecoding(Drafter):
    """Follows the likeliest continuation of each suffix of the text, and drafts the one that promises most tokens.

    A continuation's token is drafted while the product of the frequencies up to it is at least `least`; the sum of
    these products is the expected number of accepted tokens. Suffixes are looked up in the text itself and among the
    continuations of earlier `generate` calls; the text itself wins a tie, and the longer suffix.
    """

    def __init__(
        self,
        *,
        depth: int = 16,
        factor: float = 1.0,
        offset: float = 0.0,
        least: float = 0.1,
        memory: int = 1 << 17,
    ) -> None:
        """Remember sequences of up to `depth` tokens.

        Args:
            depth: longest sequence that is counted, a suffix and its drafts together; behind it the sequence's first
                occurrence is copied. Cost grows with depth; more than 16 helped only repetitive text, marginally.
            factor: a suffix of m tokens is trusted for ``factor * m + offset`` drafts.
            offset: see factor.
            least: smallest product of frequencies of a draft.
            memory: most tokens of earlier calls; then the oldest are forgotten, one for each new one. 0: none.

        Raises:
            ValueError: depth below 2, or a memory of fewer tokens than depth that is not 0.
        """
        if depth < 2:
            raise ValueError(f"SuffixDecoding: depth must be at least 2, got {depth}")
        if memory != 0 and memory < depth:
            raise ValueError(f"SuffixDecoding: memory must be 0 or at least depth = {depth}, got {memory}")
        self.depth, self.factor, self.offset, self.least = depth, factor, offset, least
        self._past = SuffixIndex(depth=depth, capacity=memory) if memory else None

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """An index for each text."""
        self._read = [0] * sequences.batch
        self._texts = [SuffixIndex(depth=self.depth) for _ in sequences.rows]

    def join(self, sequences: Sequences, parts: Sequence[Part]) -> None:
        """Take the indexes."""
        self._read = [n for part in parts for n in part.items(part.drafter._read)]
        self._texts = [text for part in parts for text in part.items(part.drafter._texts)]

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """Read what is new in each text, then follow its suffixes."""
        return copies([tokens for _, tokens in self.propose(sequences, length)], sequences.tokens.device)

    def propose(self, sequences: Sequences, length: int) -> list[tuple[float, list[int]]]:
        """Expected accepted tokens, and the draft, of each request."""
        ids, cu = array("q"), array("q", [0])
        for b, row in enumerate(sequences.rows):
            ids.extend(row[self._read[b] :])
            cu.append(len(ids))
            self._read[b] = len(row)
        found = draft_suffixes(
            self._texts,
            torch.tensor(ids, dtype=torch.int64, device="cpu"),
            torch.tensor(cu, dtype=torch.int64, device="cpu"),
            length=length,
            memory=self._past,
            factor=self.factor,
            offset=self.offset,
            least=self.least,
        )
        columns = (found.scores.tolist(), found.token_ids.tolist(), found.lengths.tolist())
        return [(score, tokens[:count]) for score, tokens, count in zip(*columns, strict=True)]

    def end(self, sequences: Sequences, numbers: Sequence[int]) -> None:
        """Remember the continuations for later texts."""
        if self._past is None:
            return
        for b in numbers:
            text, row = self._texts[b], sequences.rows[b]
            text.append(row[len(text) :])
            self._past.remember(text, sequences.prompts[b])

    def share(self, other: Drafter) -> None:
        """Look suffixes up among the continuations of both from now on."""
        assert isinstance(other, SuffixDecoding)
        self._past = other._past
