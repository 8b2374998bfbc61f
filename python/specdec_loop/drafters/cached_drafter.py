"""Base of drafters with their own cache: it follows the committed tokens and holds the drafted nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..sequences import Sequences
from ..tree_cache import TreeCache
from .base import Drafter, Part, kept_rows


class CachedDrafter(Drafter):
    """Runs a model or head on a cache of its own; what is drafted is its subclasses' affair.

    What the text has and the cache lacks is run and committed when a draft begins; its last row tells the first drafts.
    Drafted nodes hang behind it and are dropped when the next draft begins, accepted or not: so it does not matter who
    drafted what a step accepted, and nothing but the text decides what the cache holds.
    """

    lag: ClassVar[int] = 0  # tokens that a text has more than it has rows

    def _open(self, config: Any, sequences: Sequences, longest: int, dtype: torch.dtype, device: torch.device) -> int:
        """Make the cache for drafts of up to `longest` tokens; returns its capacity."""
        # Where no step has a draft, all new tokens may be lacking: then so many rows are run behind a finished text.
        capacity = sequences.tokens.shape[1] + sequences.room + self._rows(longest)
        self._cache = TreeCache(config, batch=sequences.batch, capacity=capacity, dtype=dtype, device=device)
        self._known = [0] * sequences.batch  # rows of each request
        self._nodes = 0  # rows of drafted nodes behind them
        self._inputs: dict[str, Any] = {}  # of the last nodes
        return capacity

    def _rows(self, longest: int) -> int:
        """Most rows written between two commits: the new ones and the drafted nodes."""
        return 2 * self.nodes(longest)

    def prefill(self, sequences: Sequences, hidden: Tensor | None) -> None:
        """Run the prompts but for their last token."""
        self._run_prompts(sequences)

    def join(self, sequences: Sequences, parts: Sequence[Part]) -> None:
        """Copy the rows of the caches."""
        self._known = [known for part in parts for known in part.items(part.drafter._known)]
        self._cache.take([(part.drafter._cache, part.numbers) for part in parts])
        self._cache.know_lengths(self._known)

    def _run_prompts(self, sequences: Sequences) -> None:
        """Run the prompts but for the last token of each."""
        count = sequences.longest - self.lag - 1
        if count > 0:
            prompts = sequences.tokens[:, self.lag : self.lag + count]
            self._run_chain(prompts, 1)
            self._cache.commit((sequences.lengths - self.lag - 2).clamp(min=-1).int())
            self._known = [max(end - self.lag - 1, 0) for end in sequences.ends]
            self._cache.know_lengths(self._known)

    def _unseen(self, sequences: Sequences) -> tuple[list[int], list[int]]:
        """Of each request, the rows that its text calls for, and how many of them are lacking."""
        ends = [max(end - self.lag, 0) for end in sequences.ends]
        return ends, [end - known for end, known in zip(ends, self._known, strict=True)]

    def _run_unseen(self, sequences: Sequences) -> Tensor:
        """Run what the text has and the cache lacks; what its last row says, ``[batch, 1, ...]``.

        It says nothing of a request that has nothing new, which is a finished one.
        """
        self._cache.crop(-self._nodes)
        ends, counts = self._unseen(sequences)
        self._known, self._nodes, count = ends, 0, max(1, *counts)
        if min(ends) == max(ends) and min(counts) == count:  # no request needs a place of its own
            out = self.timed(self._run_chain, sequences.tokens.narrow(1, sequences.ends[0] - count, count), 1)
            self._cache.commit(count - 1)
        else:
            first = self._cache.lengths + self.lag
            place = first[:, None] + torch.arange(count, device=first.device)
            new = sequences.tokens.gather(1, place.clamp(max=sequences.tokens.shape[1] - 1))
            out = self.timed(self._run_chain, new, [max(n, 1) - 1 for n in counts])
            self._cache.commit(((sequences.lengths - first).clamp(min=0) - 1).int())  # -1: nothing is new
        self._cache.know_lengths(ends)
        return out

    def _run_next(self, token_ids: Tensor, *before: Tensor) -> Tensor:
        """Run one more token ``[batch, 1]`` of a chain; what its row says."""
        out = self.timed(self._run_chain, token_ids, 0, *before)
        self._nodes += 1
        return out

    def _run_nodes(self, token_ids: Tensor, parents: Tensor | None, *said: Tensor) -> Tensor:
        """Run nodes of a tree whose parents are rows of the last run, which `said` something; what their rows say.

        `parents` int64 ``[batch, nodes]``; None: the texts themselves, with one row of each request.
        """
        out = self.timed(self._run_level, token_ids, parents, *said)
        self._nodes += token_ids.shape[1]
        return out

    def _run_chain(self, token_ids: Tensor, keep: Sequence[int] | int, *before: Tensor) -> Tensor:
        return self._run(token_ids, self._cache.chain_inputs(token_ids.shape[1]), *before, keep=keep)

    def _run_level(self, token_ids: Tensor, parents: Tensor | None, *said: Tensor) -> Tensor:
        count = token_ids.shape[1]
        if parents is None:
            self._inputs = self._cache.sibling_inputs(count)
            return self._run(token_ids, self._inputs, *(rows.expand(-1, count, -1) for rows in said))
        self._inputs = self._cache.child_inputs(self._inputs, parents)
        return self._run(token_ids, self._inputs, *(kept_rows(rows, parents) for rows in said))

    def _run(self, token_ids: Tensor, inputs: dict[str, Any], *before: Tensor, keep: Sequence[int] | int = 0) -> Tensor:
        """One forward; what its rows say.

        Args:
            token_ids: int64 ``[batch, count]``, target ids; -1 where a request has none.
            inputs: of the cache.
            before: what the model reads of each node's parent, beside the token.
            keep: which rows are wanted: so many last ones, 0: all; or the number of one of each request.
        """
        raise NotImplementedError  # a model or a head: its subclasses say which

    def _of_running(self, ids: Tensor, sequences: Sequences) -> Tensor:
        """Drafts ``[batch, ...]``, none for a finished text."""
        if not any(sequences.is_finished):
            return ids
        is_finished = torch.tensor(sequences.is_finished).to(ids.device, non_blocking=True)
        return ids.masked_fill(is_finished.view(-1, *[1] * (ids.dim() - 1)), -1)
