"""A corpus of tokens in which every place that continues a given context is found at once: a suffix array."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .sequences import common

KIND = "specdec_loop datastore, read backwards"


class Datastore:
    """Token sequences back to front, and their places in the order of the `depth` tokens before them.

    Backwards, an end of a context is a beginning, and the places behind its longest end that occurs are neighbours of
    the one where the context would stand: one search finds them. Sequences are separated by -1, so that nothing is
    found across two of them. Built by doubling: an order by the first n tokens gives each place a rank, and pairs of
    ranks n apart the order by the first 2 n. A file is mapped, not read: many processes share its pages.

    Example:
        >>> from specdec_loop.datastore import Datastore
        >>> store = Datastore.build([[1, 2, 3, 1, 2, 4], [2, 5]])
        >>> sorted(store.continuations([7, 1, 2], length=2))
        [[3, 1], [4]]
    """

    def __init__(self, tokens: Tensor, order: Tensor, depth: int) -> None:
        """Take int32 tokens, the last one first, and places; see `build` and `load`."""
        self.depth = depth
        self._arrays = tokens, order
        self._tokens, self._order = tokens.numpy().data, order.numpy().data
        # Places behind token t are those from _firsts[t + 1] on: half of a search, the half in memory that is cold.
        self._firsts = [0, *torch.bincount(tokens + 1).cumsum(0).tolist()] if len(tokens) else [0]

    def __len__(self) -> int:
        """Tokens, separators included."""
        return len(self._tokens)

    @classmethod
    def build(cls, sequences: Iterable[Sequence[int]], depth: int = 16) -> Datastore:
        """Sort the places of sequences by the `depth` tokens before them, a power of two."""
        if depth < 1 or depth & (depth - 1):
            raise ValueError(f"Datastore: depth must be a power of two, got {depth}")
        flat = [torch.tensor([*sequence, -1], dtype=torch.int64) for sequence in sequences]
        if not flat:
            raise ValueError("Datastore: sequences must be at least one, got none")
        tokens = torch.cat(flat).flip(0)
        if (least := int(tokens.min())) < -1 or int((tokens < 0).sum()) > len(flat):  # -1 only between sequences
            raise ValueError(f"Datastore: sequences must be of token ids >= 0, got {least}")
        if (most := int(tokens.max())) >= 2**31 - 1:
            raise ValueError(f"Datastore: sequences must be of token ids below 2^31 - 1, got {most}")
        rank, span = tokens + 1, 1
        while span < depth:
            behind = torch.cat([rank[span:], rank.new_zeros(min(span, len(rank)))])[: len(rank)]
            rank = torch.unique(rank * (int(rank.max()) + 1) + behind, return_inverse=True)[1]
            span *= 2
        return cls(tokens.int(), rank.argsort(stable=True).int(), depth)

    def save(self, path: str | Path) -> None:
        """Write a file that `load` maps."""
        tokens, order = self._arrays
        torch.save({"kind": KIND, "depth": self.depth, "tokens": tokens, "order": order}, path)

    @classmethod
    def load(cls, path: str | Path) -> Datastore:
        """Map a file that `save` wrote.

        Raises:
            ValueError: the file is none of these.
            FileNotFoundError: there is none.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"Datastore: there is no file {path}")
        try:
            held = torch.load(path, mmap=True, weights_only=True)
        except Exception as error:  # torch has many
            raise ValueError(f"Datastore: {path} must be a file that Datastore.save wrote") from error
        if not isinstance(held, dict) or held.get("kind") != KIND:
            raise ValueError(f"Datastore: {path} must be a file that Datastore.save wrote")
        return cls(held["tokens"], held["order"], held["depth"])

    def continuations(
        self, context: Sequence[int], *, length: int, shortest: int = 1, most: int = 64
    ) -> list[list[int]]:
        """Continuations of the longest suffix of the context that occurs: up to `length` tokens each.

        Args:
            context: tokens.
            length: of a continuation; the end of a sequence cuts it.
            shortest: an end of fewer tokens is not looked for.
            most: where there are more, this many spread evenly over them.
        """
        if not context:
            return []
        pattern = list(context[: -self.depth - 1 : -1])
        if pattern[0] + 2 >= len(self._firsts):
            return []
        first, end = self._firsts[pattern[0] + 1 : pattern[0] + 3]
        place = bisect_left(self._every, pattern, first, end, key=lambda i: self._behind(i, len(pattern)))
        sides = [i for i in (place - 1, place) if first <= i < end]
        matched = max((common(pattern, self._behind(i, len(pattern))) for i in sides), default=0)
        if matched < max(shortest, 1):
            return []
        hits = self._neighbours(pattern[:matched], place)
        step = max(-(-len(hits) // most), 1)
        return [tokens for hit in hits[::step] if (tokens := self._until_separator(self._order[hit], length))]

    @property
    def _every(self) -> range:
        return range(len(self))

    def _behind(self, i: int, size: int) -> list[int]:
        """Tokens before a place, the nearest first."""
        start = self._order[i]
        return self._tokens[start : start + size].tolist()

    def _neighbours(self, pattern: list[int], place: int) -> range:
        """Places before and from `place` on that stand behind a pattern."""

        def tokens(i: int) -> list[int]:
            return self._behind(i, len(pattern))

        before, after = 1, 1
        while before <= place and tokens(place - before) == pattern:
            before *= 2
        while place + after <= len(self) and tokens(place + after - 1) == pattern:
            after *= 2
        first = bisect_left(self._every, pattern, max(place - before, 0), place, key=tokens)
        return range(first, bisect_right(self._every, pattern, place, min(place + after, len(self)), key=tokens))

    def _until_separator(self, start: int, length: int) -> list[int]:
        tokens = self._tokens[max(start - length, 0) : start].tolist()[::-1]
        return tokens[: tokens.index(-1)] if -1 in tokens else tokens
