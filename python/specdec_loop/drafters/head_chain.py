"""Multi-token prediction with a chained head: each token and feature that it drafts is its next input."""

from __future__ import annotations

import torch

from ..text import Text
from .base import CHAIN_RULES, Draft
from .feature_drafter import FeatureDrafter


class HeadChain(FeatureDrafter):
    """Drafts a chain by one forward of the head a token: DeepSeek's MTP, or EAGLE without a tree."""

    rules = CHAIN_RULES

    def draft(self, text: Text, length: int) -> Draft:
        """One draw and one forward a token."""
        features, places = self._run_pairs()
        self._confidence.begin()
        first, rows, drawn = torch.zeros(1, dtype=torch.int64, device=text.tokens.device), [], []
        for ahead in range(length):
            rows.append(self.head.logits(features))
            drawn.append(self._draw(rows[-1], text, ahead, 1, first)[0][:, :, 0])
            if self._confidence.is_lost(rows[-1][:, 0], self._race.temperature):
                break
            if ahead + 1 < length:
                features, places = self._run_nodes(drawn[-1], features, places)
        ids = self._confidence.cut(torch.cat(drawn, 1))
        if not self._is_drawn:
            return Draft(ids)
        return Draft(ids, torch.cat(rows, 1), sampling=self._law, token_map=self.head.token_map)

    def _rows(self, longest: int) -> int:
        return 2 * longest + 1
