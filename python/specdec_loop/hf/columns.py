"""Texts as transformers holds them: prompts padded to one width, and one column more for each new token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..drafters import Draft
from ..generation import Hooks
from ..sequences import Sequences
from .processors import Calls


class Columns(Hooks):
    """Calls processors, criteria and a streamer as plain decoding calls them.

    Processors get each position's own prefix. Requests run ahead of one another; a column is complete when the slowest
    has come by, and then the criteria and the streamer get it, each column once and in order. So a criterion may look
    at the whole batch, and may count its calls; a request that ran on behind its end is cut back.

    Attributes:
        ids: int64 ``[batch, columns]``: prompts, then all committed tokens, then padding.
        scores: of each complete column, ``[batch, vocab]``, after all processors; zeros where a request was finished.
        logits: the same before them.
    """

    def __init__(
        self,
        input_ids: Tensor,
        columns: int,
        *,
        pad: int,
        calls: Sequence[Any] = (),
        skipped: Tensor | None = None,
        processors: Sequence[Any] = (),
        criteria: Any = None,
        streamer: Any = None,
        keeps_logits: bool = False,
        keeps_scores: bool = False,
    ) -> None:
        """Take what is to be called.

        Args:
            input_ids: int64 ``[batch, width]``, padded.
            columns: that may follow, drafts included.
            pad: id of padding.
            calls: processors that change the logits that are verified.
            skipped: columns ``[batch]`` in front of each prompt that penalties do not see.
            processors: all of them, for `scores`.
            criteria: a StoppingCriteriaList; None: the loop's own stops are enough.
            streamer: of transformers.
            keeps_logits: keep `logits`.
            keeps_scores: keep `scores`.
        """
        batch, self._width = input_ids.shape
        behind = torch.full((batch, columns), pad, dtype=torch.int64, device=input_ids.device)
        self.ids = torch.cat([input_ids, behind], 1)
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self._skipped = skipped
        self._pad, self._calls, self._processors = pad, Calls(calls), Calls(processors)
        self._criteria, self._streamer, self._keeps = criteria, streamer, keeps_logits or keeps_scores
        self._keeps_logits, self._keeps_scores = keeps_logits, keeps_scores
        self._ends_alone = any(hasattr(c, "eos_token_id") for c in criteria or ())
        self._counts = [0] * batch  # new tokens in `ids`
        self._complete = 0  # columns behind the prompts that every request has
        self._unfinished = torch.ones(batch, dtype=torch.bool, device=input_ids.device)
        self._rows: list[list[Tensor]] = [[] for _ in range(batch)]  # logits of tokens in incomplete columns

    def prompts(self) -> Tensor:
        """Without the columns that are skipped."""
        prompts = self.ids[:, : self._width]
        if self._skipped is None:
            return prompts
        return torch.where(torch.arange(self._width, device=prompts.device) < self._skipped[:, None], -1, prompts)

    def distribution(self, sequences: Sequences, draft: Draft, logits: Tensor) -> Tensor:
        """Processed logits; each column is one call with all requests, of which those that are there are read."""
        if self._keeps:
            self._latest = logits
        running = [b for b, is_finished in enumerate(sequences.is_finished) if not is_finished]
        if not self._calls or not running:
            return logits
        if draft.parents is not None:
            raise ValueError("specdec_loop.hf: logits processors need a drafter of chains, got one of trees")
        drafts, request = draft.token_ids.shape[1], torch.arange(len(logits), device=logits.device)
        ids, counts = self.ids.clone(), torch.tensor(self._counts, device=logits.device)
        if drafts:
            place = (self._width + counts)[:, None] + torch.arange(drafts, device=ids.device)
            ids.scatter_(1, place, torch.where(draft.token_ids < 0, self._pad, draft.token_ids))
        distribution = logits.to(torch.float32, copy=True)
        first, last = (bound(self._counts[b] for b in running) for bound in (min, max))
        for column in range(first, last + drafts + 1):
            row = column - counts
            own = row.clamp(0, drafts)
            scores = self._calls(ids[:, : self._width + column], logits[request, own].float())
            distribution[request, own] = torch.where((row == own)[:, None], scores, distribution[request, own])
        return distribution

    def grown(self, sequences: Sequences, path: Tensor | None) -> None:
        """Take the new tokens, then hand on the columns that are complete."""
        for b, row in enumerate(sequences.rows):
            new = row[sequences.prompts[b] + self._counts[b] :]
            if self._keeps and new:
                nodes = [*range(len(new))] if path is None else [0, *path[b, : len(new) - 1].tolist()]
                self._rows[b] += self._latest[b, nodes].unbind()
            start = self._width + self._counts[b]
            self.ids[b, start : start + len(new)] = torch.tensor(new, dtype=torch.int64)
            self._counts[b] += len(new)
        if self._criteria is None and self._streamer is None and not self._keeps:
            return
        while self._unfinished.any() and self._is_complete(sequences):
            self._hand_on(sequences)

    def _is_complete(self, sequences: Sequences) -> bool:
        has_it = [count > self._complete for count in self._counts]
        return any(has_it) and all(has or sequences.is_finished[b] for b, has in enumerate(has_it))

    def _hand_on(self, sequences: Sequences) -> None:
        """One column: its logits, then the streamer, then the criteria, as plain decoding does."""
        end = self._width + self._complete + 1
        if self._keeps:
            zeros = torch.zeros_like(self._latest[0, 0])
            logits = torch.stack([rows.pop(0) if rows else zeros for rows in self._rows]).float()
            if self._keeps_logits:
                self.logits.append(logits)
            if self._keeps_scores:
                self.scores.append(self._processors(self.ids[:, : end - 1], logits.clone()))
        if self._streamer is not None:
            self._streamer.put(self.ids[:, end - 1].cpu())
        self._complete += 1
        if self._criteria is None:
            return
        done = self._criteria(self.ids[:, :end], tuple(self.scores) if self._keeps_scores else None)
        ended = self._unfinished & done.to(self._unfinished.device)
        self._unfinished &= ~ended
        # Where no criterion knows of an end token, transformers runs finished requests on until all are.
        cut = ended if self._ends_alone else (~self._unfinished.any()).expand_as(ended)
        for b in cut.nonzero().flatten().tolist():
            sequences.finish(b, sequences.prompts[b] + min(self._complete, self._counts[b]))
            self._counts[b] = min(self._complete, self._counts[b])
            self._rows[b] = []
            self.ids[b, end:] = self._pad
