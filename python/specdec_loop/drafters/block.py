"""Block drafters: one forward of a head drafts all positions at once, as a chain or as a tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from torch import Tensor

from specdec_kernels import SampleResult, Sampling

from ..heads import DFlashHead, FeatureHead
from ..sequences import Sequences
from .base import CHAIN_RULES, Draft, kept_rows
from .feature_drafter import FeatureDrafter
from .marginals import MarginalTree
from .races import PositionRaces


class AtOnce(FeatureDrafter):
    """Drafts that a head predicts in one forward."""

    def __init__(self, head: FeatureHead, *, sampling: Sampling | None = None) -> None:
        """Draft with `head`.

        Args:
            head: on the target's device.
            sampling: see `FeatureDrafter`.
        """
        super().__init__(head, sampling=sampling)

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Make the cache; `prefill` brings the prompts."""
        super().begin(sequences, rule=rule, sampling=sampling, longest=longest)
        self._positions = PositionRaces(self._race, sequences, is_drawn=self._is_drawn)

    def _block(self, sequences: Sequences, length: int) -> Tensor:
        """Logits of the next positions, at most `length`: ``[batch, positions, draft_vocab]``."""
        raise NotImplementedError  # of masks behind the text, of a block


class AtOnceChain(AtOnce):
    """A chain of such drafts.

    Given the text the positions are independent, so the rows of logits are the very distributions that a chain is
    drawn from: ``ratio`` and ``block`` are exact.
    """

    rules: ClassVar[Collection[str]] = CHAIN_RULES

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """The best token, or the drawn one, of each position."""
        logits = self._block(sequences, length)
        drawn = self._positions.best(logits, sequences, token_map=self.head.token_map)
        ids = self._of_running(drawn.token_ids.view(logits.shape[:2]), sequences)
        if not self._is_drawn:
            return Draft(ids)
        stats = drawn.logsumexp.view(ids.shape), drawn.threshold.view(ids.shape)
        return Draft(ids, logits, stats, self._distribution, self.head.token_map)


class _BlockDrafter(AtOnce):
    """Row i of the head's cache is the feature of token i; a block behind the rows is dropped with the next draft."""

    head: DFlashHead

    def _run(self, token_ids: Tensor, inputs: dict[str, Any], *before: Tensor, keep: Sequence[int] | int = 0) -> Tensor:
        """Features of the text; the tokens themselves are in them."""
        features = self.head.fuse(self._hidden[:, : token_ids.shape[1]])
        self.head.remember(features, inputs.get("position_ids"), self._cache)
        return kept_rows(features, keep)

    def _block(self, sequences: Sequences, length: int) -> Tensor:
        """Of a block behind the text."""
        length = min(length, self.head.longest)
        self._run_unseen(sequences)
        block = self.head.masked(sequences.last(1), length)
        self._nodes += block.shape[1]
        return self.timed(self._run_block, block, length)

    def _run_block(self, token_ids: Tensor, length: int) -> Tensor:
        inputs = self._cache.chain_inputs(token_ids.shape[1])
        mask = inputs.get("attention_mask")
        seen = None if mask is None else mask[:, :, -1:]  # every row sees what a chain's last token sees
        rows = self.head(token_ids, inputs.get("position_ids"), seen, self._cache)
        return self.head.logits(rows[:, -length:])


class BlockDrafter(_BlockDrafter, AtOnceChain):
    """Drafts a chain by one forward of the head."""


class BlockTree(_BlockDrafter, MarginalTree):
    """Drafts the likeliest tree of the positions' best tokens by one forward of the head."""

    def __init__(self, head: DFlashHead, *, width: int = 4, total: int = 12, sampling: Sampling | None = None) -> None:
        """Choose the sizes.

        Args:
            head: on the target's device.
            width: see `MarginalTree`.
            total: likewise.
            sampling: see `FeatureDrafter`.

        Raises:
            ValueError: sizes that do not fit.
        """
        _BlockDrafter.__init__(self, head, sampling=sampling)
        MarginalTree.__init__(self, depth=head.longest, width=width, total=total)

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Under ``match`` candidates come from the target's race; elsewhere they are the likeliest tokens."""
        super().begin(sequences, rule=rule if rule == "match" else "greedy", sampling=sampling, longest=longest)

    def _drawn(self, sequences: Sequences, positions: int, count: int) -> SampleResult:
        logits = self._block(sequences, positions)
        return self._positions.best(logits, sequences, count, token_map=self.head.token_map)
