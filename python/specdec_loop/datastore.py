"""A corpus of tokens in which every place that continues a given context is found at once: a suffix array."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

KIND = "specdec_loop datastore"


class Datastore:
    """Token sequences, and their suffixes in the order of their first `depth` tokens.

    Sequences are separated by -1, so that nothing is found across two of them. Built by doubling: an order by the first
    n tokens gives each place a rank, and pairs of ranks n apart the order by the first 2 n. A file is mapped, not read:
    many processes share its pages.

    Example:
        >>> from specdec_loop.datastore import Datastore
        >>> store = Datastore.build([[1, 2, 3, 1, 2, 4], [2, 5]])
        >>> sorted(store.continuations([7, 1, 2], length=2))
        [[3, 1], [4]]
    """

    def __init__(self, tokens: Tensor, order: Tensor, depth: int) -> None:
        """Take int32 tokens and places; see `build` and `load`."""
        self.depth = depth
        self._arrays = tokens, order
        self._tokens, self._order = tokens.numpy().data, order.numpy().data

    def __len__(self) -> int:
        """Tokens, separators included."""
        return len(self._tokens)

    @classmethod
    def build(cls, sequences: Iterable[Sequence[int]], depth: int = 16) -> Datastore:
        """Sort the suffixes of sequences by their first `depth` tokens, a power of two."""
        if depth < 1 or depth & (depth - 1):
            raise ValueError(f"Datastore: depth must be a power of two, got {depth}")
        flat = [torch.tensor([*sequence, -1], dtype=torch.int32) for sequence in sequences]
        if not flat:
            raise ValueError("Datastore: sequences must be at least one, got none")
        tokens = torch.cat(flat)
        rank, span = tokens.long() + 1, 1
        while span < depth:
            behind = torch.cat([rank[span:], rank.new_zeros(min(span, len(rank)))])[: len(rank)]
            rank = torch.unique(rank * (int(rank.max()) + 1) + behind, return_inverse=True)[1]
            span *= 2
        return cls(tokens, rank.argsort(stable=True).int(), depth)

    def save(self, path: str | Path) -> None:
        """Write a file that `load` maps."""
        tokens, order = self._arrays
        torch.save({"kind": KIND, "depth": self.depth, "tokens": tokens, "order": order}, path)

    @classmethod
    def load(cls, path: str | Path) -> Datastore:
        """Map a file that `save` wrote.

        Raises:
            ValueError: the file is none of these.
        """
        held = torch.load(path, mmap=True, weights_only=True)
        if not isinstance(held, dict) or held.get("kind") != KIND:
            raise ValueError(f"Datastore: {path} must be a file that Datastore.save wrote")
        return cls(held["tokens"], held["order"], held["depth"])

    def continuations(
        self, context: Sequence[int], *, length: int, shortest: int = 1, most: int = 64
    ) -> list[list[int]]:
        """What followed the longest end of the context that occurs: up to `length` tokens each.

        Args:
            context: tokens.
            length: of a continuation; the end of a sequence cuts it.
            shortest: an end of fewer tokens is not looked for.
            most: where there are more, this many spread evenly over them.
        """
        longest = min(self.depth, len(context))
        hits, matched, low = range(0), 0, shortest
        while low <= longest:  # an end that occurs has shorter ends that occur
            middle = (low + longest + 1) // 2
            found = self._places(list(context[-middle:]))
            if found:
                hits, matched, low = found, middle, middle + 1
            else:
                longest = middle - 1
        step = max(-(-len(hits) // most), 1)
        ends = [self._order[hit] + matched for hit in hits[::step]]
        return [tokens for end in ends if (tokens := self._until_separator(end, length))]

    def _places(self, pattern: list[int]) -> range:
        """Places in the order whose suffixes begin with a pattern."""
        tokens, order, size = self._tokens, self._order, len(pattern)

        def beginning(i: int) -> list[int]:
            return tokens[order[i] : order[i] + size].tolist()

        every = range(len(order))
        return range(bisect_left(every, pattern, key=beginning), bisect_right(every, pattern, key=beginning))

    def _until_separator(self, start: int, length: int) -> list[int]:
        tokens = self._tokens[start : start + length].tolist()
        return tokens[: tokens.index(-1)] if -1 in tokens else tokens
