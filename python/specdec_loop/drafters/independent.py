"""Several independent drafts of one model, verified together (Yin et al. 2024, Algorithm 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Noise, Sampling, sample

from ..text import Text
from .base import Draft, Outcome
from .draft_model import DraftModel


class IndependentDrafts(DraftModel):
    """Draws chains independently of one another; each first token is tried in turn, then its own chain is followed.

    Rule ``recursive`` with replacement does that on a tree whose root has a child for each chain. More chains raise the
    acceptance of the first token towards 1, and of no other.
    """

    rules = ("recursive",)

    def __init__(
        self, model: Any, chains: int = 3, *, sampling: Sampling | None = None, token_map: Tensor | None = None
    ) -> None:
        """Draft `chains` chains; the rest as in `DraftModel`.

        Raises:
            ValueError: fewer than 1.
        """
        super().__init__(model, sampling=sampling, token_map=token_map)
        if chains < 1:
            raise ValueError(f"IndependentDrafts: chains must be at least 1, got {chains}")
        self.chains = chains

    def nodes(self, length: int) -> int:
        """The root and the chains."""
        return 1 + self.chains * length

    def begin(self, text: Text, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Run the prompts, and lay out the chains behind one and behind two tokens."""
        super().begin(text, rule=rule, sampling=sampling, longest=longest)
        self._behind_one, self._behind_two = (self._links(text, longest, context) for context in (1, 2))
        self._lanes = torch.arange(self.chains, device=text.tokens.device).repeat(text.batch)
        self._laws = Sampling(*(None if x is None else x.repeat_interleave(self.chains) for x in self._law))

    def draft(self, text: Text, length: int) -> Draft:
        """One forward a depth, of all chains side by side."""
        chains = self.chains
        self._cache.know_lengths([max(end - 2, 0) for end in text.ends])
        new = text.last(2)
        rows = [self.model(self._known(new), **self._cache.chain_inputs(2), logits_to_keep=1).logits]
        levels = [self._drawn(rows[0].expand(-1, chains, -1), text, 0)]  # the same law for every first token
        for ahead in range(1, length):
            inputs = self._cache.tree_inputs(self._behind_two[:, : 2 + ahead * chains].contiguous())
            rows.append(self.model(self._known(levels[-1]), **inputs).logits)
            levels.append(self._drawn(rows[-1], text, ahead))
        drafts = torch.cat(levels, 1).masked_fill(text.lengths[:, None] < 2, -1)
        leaves = rows[0].expand(-1, chains, -1)  # not read: nothing was drawn behind a leaf
        return Draft(
            torch.cat([new[:, 1:], drafts], 1),
            torch.cat([*rows, leaves], 1),
            sampling=self._law,
            token_map=self.token_map,
            parents=self._behind_one[:, : 1 + length * chains].contiguous(),
            max_depth=length,
            replacement=True,
        )

    def commit(self, text: Text, outcome: Outcome) -> None:
        """Keep the last token and all accepted ones but the last, which will be one of the last two."""
        assert outcome.path is not None
        self._follow(text, torch.cat([torch.ones_like(outcome.path[:, :1]), outcome.path + 1], 1))

    def _drawn(self, logits: Tensor, text: Text, ahead: int) -> Tensor:
        """A token of each chain, ``[batch, chains]``; chains differ by their lane."""
        noise = Noise(*(x.repeat_interleave(self.chains) for x in text.noise(ahead) if x is not None))
        drawn = sample(
            logits.flatten(0, 1),
            sampling=self._laws,
            noise=noise,
            purpose="draft",
            lane=self._lanes,
            token_map=self.token_map,
        )
        return drawn.token_ids.view(-1, self.chains)

    def _links(self, text: Text, length: int, context: int) -> Tensor:
        """Parents ``[batch, nodes]`` of tokens in a row, and of the chains that begin behind the last of them."""
        links = torch.arange(context + self.chains * length, dtype=torch.int32) - self.chains
        links[:context] = torch.arange(-1, context - 1)
        links[context : context + self.chains] = context - 1
        return links.to(text.tokens.device).repeat(text.batch, 1)
