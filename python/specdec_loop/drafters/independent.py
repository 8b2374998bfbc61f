"""Several independent drafts of one model, verified together (Yin et al. 2024, Algorithm 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Sampling, sample

from ..sequences import Sequences
from .base import Draft
from .draft_model import DraftModel
from .races import Race


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

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Lay out the chains."""
        super().begin(sequences, rule=rule, sampling=sampling, longest=longest)
        links = torch.arange(1 + self.chains * longest, dtype=torch.int32) - self.chains
        links[: 1 + self.chains] = torch.tensor([-1, *[0] * self.chains])
        self._parents = links.to(sequences.tokens.device).repeat(sequences.batch, 1)
        self._lanes = torch.arange(self.chains, device=sequences.tokens.device).repeat(sequences.batch)
        self._race = Race(self._distribution, sequences, [0] * self.chains, has_step=True)

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """One forward a depth, of all chains side by side."""
        chains = self.chains
        rows = [self._run_unseen(sequences)]
        levels = [self._drawn(rows[0].expand(-1, chains, -1), sequences, 0)]  # one distribution for every first token
        for ahead in range(1, length):
            links = self._parents[:, : 1 + ahead * chains].contiguous()
            rows.append(self.timed(self._run_depth, levels[-1], links))
            self._nodes += chains
            levels.append(self._drawn(rows[-1], sequences, ahead))
        drafts = self._of_running(torch.cat(levels, 1), sequences)
        leaves = rows[0].expand(-1, chains, -1)  # not read: nothing was drawn behind a leaf
        return Draft(
            torch.cat([sequences.last(1), drafts], 1),
            torch.cat([*rows, leaves], 1),
            sampling=self._distribution,
            token_map=self.token_map,
            parents=self._parents[:, : 1 + length * chains].contiguous(),
            max_depth=length,
            replacement=True,
        )

    def _run_depth(self, token_ids: Tensor, links: Tensor) -> Tensor:
        return self._run(token_ids, self._cache.tree_inputs(links, is_root_committed=True))

    def _drawn(self, logits: Tensor, sequences: Sequences, ahead: int) -> Tensor:
        """A token of each chain, ``[batch, chains]``; chains differ by their lane."""
        drawn = sample(
            logits.flatten(0, 1),
            sampling=self._race.distribution,
            rng=self._race.rng(sequences, ahead),
            purpose="draft",
            lane=self._lanes,
            token_map=self.token_map,
        )
        return drawn.token_ids.view(-1, self.chains)
