"""Multi-token prediction with a chained head: each token and feature that it drafts is its next input."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import torch

from ..sequences import Sequences
from .base import CHAIN_RULES, Draft
from .feature_drafter import FeatureDrafter


class HeadChain(FeatureDrafter):
    """Drafts a chain by one forward of the head a token: DeepSeek's MTP, or EAGLE without a tree."""

    rules: ClassVar[Collection[str]] = CHAIN_RULES

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """One draw and one forward a token."""
        features, rows, drawn = self._run_unseen(sequences), [], []
        self._confidence.start(sequences)
        with self.grammars.chain():
            for ahead in range(length):
                rows.append(self.grammars.restrict(self._logits(features[:, 0]), self.head.token_map))
                drawn.append(self._draw(rows[-1], sequences, ahead))
                if ahead + 1 == length or self._confidence.is_lost(rows[-1], drawn[-1]):
                    break
                self.grammars.follow(drawn[-1].token_ids)
                features = self._run_next(drawn[-1].token_ids, features)
        ids = self._of_running(torch.cat([d.token_ids for d in drawn], 1), sequences)
        if not self._is_drawn:
            return Draft(ids)
        return Draft(ids, torch.stack(rows, 1), sampling=self._distribution, token_map=self.head.token_map)
