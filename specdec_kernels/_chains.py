"""Where the ids and rows of each request lie: dense `[batch, draft]` or flat with `cu_draft`. Plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chains(NamedTuple):
    """Ids as a padded matrix, and how to reach row i of each request."""

    ids: Tensor  # int64 [batch, max_draft], -1 past the end
    target: Tensor  # [batch, max_draft + 1, vocab] or [total + batch, vocab]
    draft: Tensor | None  # [batch, max_draft, draft_vocab] or [total, draft_vocab]
    first: Tensor | None  # int64 [batch]: cu_draft[:-1]; None in the dense layout
    bad: Tensor  # bool [batch]: bad cu_draft, no drafts are used
    lost: Tensor  # bool [batch]: not even the first row is known

    def target_rows(self, count: int) -> Tensor:
        """The first target rows of each request, [batch, count, vocab]."""
        return self._first(self.target, count, 1)

    def draft_rows(self, count: int, table: Tensor | None = None) -> Tensor:
        """The first draft rows of each request, or entries of a table laid out like them."""
        rows = self.draft if table is None else table
        assert rows is not None
        return self._first(rows, count, 0)

    def of_target_rows(self, table: Tensor, width: int, count: int | None = None) -> Tensor:
        """The first `count` (all) entries of each request, of a table with one for each target row: [rows, ...].

        Requests have `width` target rows in the dense layout.
        """
        entries: Tensor = table.unflatten(0, (-1, width)) if self.first is None else self._first(table, width, 1)
        return entries[:, :count].flatten(0, 1)

    def _first(self, rows: Tensor, count: int, extra: int) -> Tensor:
        if self.first is None:
            return rows[:, :count]
        slot = torch.arange(self.ids.shape[0], device=rows.device)
        column = torch.arange(count, device=rows.device)
        begin = self.first + extra * slot
        return rows[(begin[:, None] + column).clamp(0, max(rows.shape[0] - 1, 0))]

    def has_drafts(self, vocab: int) -> Tensor:
        """Whether a request has a drafted id to examine, bool [batch]."""
        first = self.ids[:, :1]
        return ((first >= 0) & (first < vocab)).any(1)

    def has_draft_rows(self) -> bool:
        """Whether there is any draft row to read."""
        return self.draft is not None and self.draft.numel() > 0


def chains(
    draft_ids: Tensor, target_logits: Tensor, draft_logits: Tensor | None, cu_draft: Tensor | None, max_draft: int
) -> Chains:
    """Bring both layouts to the same form; rows stay where they are."""
    device = draft_ids.device
    if cu_draft is None:
        never = torch.zeros(draft_ids.shape[0], dtype=torch.bool, device=device)
        return Chains(draft_ids.long(), target_logits, draft_logits, None, never, never)
    cu = cu_draft.long()
    total, batch = draft_ids.shape[0], cu.shape[0] - 1
    first, last = cu[:-1], cu[1:]
    lost = (first < 0) | (first > total)
    bad = lost | (last < first) | (last > total) | (last - first > max_draft)
    slot = torch.arange(batch, device=device)
    bad = bad | ((slot == 0) & (first != 0))
    length = torch.where(bad, 0, last - first)
    column = torch.arange(max_draft, device=device)
    padded = torch.cat([draft_ids.long(), draft_ids.new_full((1,), -1).long()])
    ids = padded[torch.where(column < length[:, None], first[:, None] + column, total)]
    return Chains(ids, target_logits, draft_logits, first, bad, lost)
