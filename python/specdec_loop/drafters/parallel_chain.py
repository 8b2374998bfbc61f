"""Parallel drafting: one forward of a P-EAGLE head drafts a chain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..heads import PEagleHead
from ..sequences import Sequences
from .base import kept_rows
from .block import AtOnceChain


class ParallelChain(AtOnceChain):
    """Drafts a chain by one forward of a P-EAGLE head.

    The new pairs of a text and the masks behind them run together; the masks' rows are not kept.
    """

    head: PEagleHead
    _masks = 0  # of the next forward

    def _block(self, sequences: Sequences, length: int) -> Tensor:
        """Of the last pair and the masks behind it."""
        self._masks = length - 1
        try:
            rows = self._run_unseen(sequences)
        finally:
            self._masks = 0
        return self._logits(rows)

    def _run_chain(self, token_ids: Tensor, keep: Sequence[int] | int, *before: Tensor) -> Tensor:
        """With masks behind the row of each request that is to be kept, whose rows are kept too.

        They fit: the cache has a slot for each token that one `append` may offer, and no text ever fills those.
        """
        if not self._masks:
            return super()._run_chain(token_ids, keep, *before)
        batch, count = token_ids.shape
        device = token_ids.device
        ends = [count - 1] * batch if isinstance(keep, int) else keep
        last = torch.tensor(ends).to(device, non_blocking=True)[:, None]
        is_mask = torch.arange(count + self._masks, device=device) > last
        ids = pad(token_ids, (0, self._masks)).masked_fill(is_mask, self.head.mask_token_id)
        features = self.head.fuse_masked(pad(self._hidden[:, :count], (0, 0, 0, self._masks)), is_mask)
        rows = self._run(ids, self._cache.chain_inputs(ids.shape[1]), features)
        return kept_rows(rows, last + torch.arange(1 + self._masks, device=device))
