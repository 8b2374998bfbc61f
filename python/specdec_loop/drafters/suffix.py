"""Suffix decoding: continuations by how often they followed, in this text and in texts before it (Oliaro et al.)."""

from __future__ import annotations

from collections import deque

from specdec_kernels import Sampling

from ..sequences import Sequences
from ..suffixes import Suffixes, Trie
from .base import Draft, Drafter, copies


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
            depth: of the tries; a suffix that came twice and what is drafted behind it together are no longer. Reading
                a token takes time by it; more than 16 was seen to help looping texts alone, and hardly them.
            factor: a suffix of m tokens is trusted for ``factor * m + offset`` drafts.
            offset: see factor.
            least: smallest product of frequencies of a draft.
            memory: most tokens of earlier calls; behind the call that goes beyond, the older half is forgotten. A token
                takes some 300 bytes, forgetting 6 us for each that is kept.

        Raises:
            ValueError: depth below 2, or a negative memory.
        """
        if depth < 2:
            raise ValueError(f"SuffixDecoding: depth must be at least 2, got {depth}")
        if memory < 0:
            raise ValueError(f"SuffixDecoding: memory must be at least 0, got {memory}")
        self.depth, self.factor, self.offset, self.least = depth, factor, offset, least
        self._past = Continuations(depth, memory)

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """A trie for each text."""
        self._read = [0] * sequences.batch
        self._own = [Suffixes(Trie(), self.depth) for _ in sequences.rows]
        self._others = [Suffixes(self._past.trie, self.depth) for _ in sequences.rows]

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """Read what is new in each text, then follow its suffixes."""
        return copies([tokens for _, tokens in self.propose(sequences, length)], sequences.tokens.device)

    def propose(self, sequences: Sequences, length: int) -> list[tuple[float, list[int]]]:
        """Expected accepted tokens, and the draft, of each request."""
        found = []
        for b, row in enumerate(sequences.rows):
            for i in range(self._read[b], len(row)):
                self._own[b].learn(row, i)
                self._others[b].find(row[i])
            self._read[b] = len(row)
            own, other = self._best(self._own[b], length), self._best(self._others[b], length)
            found.append(max(own, other, key=lambda draft: draft[0]))  # the first of equals
        return found

    def end(self, sequences: Sequences) -> None:
        """Remember the continuations for later texts."""
        for row, prompt in zip(sequences.rows, sequences.prompts, strict=True):
            self._past.remember(row[prompt:])

    def share(self, other: Drafter) -> None:
        """Look suffixes up among the continuations of both from now on."""
        assert isinstance(other, SuffixDecoding)
        self._past = other._past

    def _best(self, suffixes: Suffixes, length: int) -> tuple[float, list[int]]:
        """Expected accepted tokens, and the draft."""
        best: tuple[float, list[int]] = (0.0, [])
        for matched in range(len(suffixes.found) - 1, 0, -1):
            budget = min(length, int(self.factor * matched + self.offset))
            if budget <= best[0]:  # nor do shorter suffixes promise more
                break
            found = suffixes.follow(matched, budget, self.least)
            if found[0] > best[0]:
                best = found
        return best


class Continuations:
    """Suffixes of complete texts."""

    def __init__(self, depth: int, memory: int) -> None:
        """See `SuffixDecoding`."""
        self.trie, self._depth, self._memory = Trie(), depth, memory
        self._texts, self._size = deque[list[int]](), 0

    def remember(self, text: list[int]) -> None:
        """One more; where there is no room the older half is forgotten."""
        self._add(text)
        if self._size > self._memory:
            while self._size > self._memory // 2:
                self._size -= len(self._texts.popleft())
            kept, self.trie, self._texts, self._size = self._texts, Trie(), deque(), 0
            for old in kept:
                self._add(old)

    def _add(self, text: list[int]) -> None:
        suffixes = Suffixes(self.trie, self._depth)
        for i in range(len(text)):
            suffixes.learn(text, i)
        self._texts.append(text)
        self._size += len(text)
