"""Base of drafters that continue the target's features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec_kernels import SampleResult, Sampling, gather_nodes, sample

from ..heads import FeatureHead
from ..sequences import Sequences
from .base import Confidence, Outcome, Part, kept_rows, padded
from .cached_drafter import CachedDrafter
from .races import Race, with_point_masses, with_runners_up

DRAWN_RULES = ("ratio", "block", "recursive", "traversal")  # their drafts are drawn from the head's distribution


class FeatureDrafter(CachedDrafter):
    """Row i of the head's cache is the pair (feature i, token i + 1): a text of n tokens has n - 1."""

    lag = 1

    def __init__(self, head: FeatureHead, *, sampling: Sampling | None = None, confidence: float = 0.0) -> None:
        """Draft with `head`.

        Args:
            head: on the target's device.
            sampling: of drafts that are drawn, or that race with the target's noise; None: the target's.
            confidence: end drafts where their chance falls below, see `Confidence`.
        """
        self.head, self.sampling, self.features, self.networks = head, sampling, head.levels, head.networks
        self._confidence = Confidence(confidence)

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Make the cache; `prefill` brings the prompts."""
        self._is_drawn, self._distribution = rule in DRAWN_RULES, with_point_masses(self.sampling or sampling)
        follows_distribution = self._is_drawn or rule == "match"
        self._race = with_runners_up(
            self._distribution if follows_distribution else Sampling.full(sequences.batch, temperature=0.0),
            sequences,
        )
        self._races: dict[int, Race] = {}  # for so many rows a request
        self._confidence.begin(self._race.temperature)
        some = next(self.head.parameters())
        self._held: list[tuple[Tensor, list[int]]] = []
        self._num_held = [0] * sequences.batch  # pairs of each request that these are of
        self.head.reach(self._open(self.head.config, sequences, longest, some.dtype, some.device))

    def prefill(self, sequences: Sequences, hidden: Tensor | None) -> None:
        """Run the prompts' pairs but for their last."""
        assert hidden is not None
        self._hidden = hidden
        self._run_prompts(sequences)
        self._hidden = kept_rows(hidden, (sequences.lengths - 2).clamp(min=0))  # of one token: no pair, and finished

    def join(self, sequences: Sequences, parts: Sequence[Part]) -> None:
        """Take the features of new pairs too."""
        super().join(sequences, parts)
        for part in parts:
            part.drafter._join_held(part.sequences)
        lacking = [row for part in parts for row in part.rows(part.drafter._hidden)]
        self._hidden = pad_sequence(lacking, batch_first=True)

    def commit(self, sequences: Sequences, outcome: Outcome) -> None:
        """Note the features of the pairs that the step adds."""
        assert outcome.hidden is not None
        self._hidden = outcome.hidden if outcome.path is None else gather_nodes(outcome.hidden, outcome.path).values

    def skip(self, sequences: Sequences) -> None:
        """Hold the features of the new pairs: the next step brings others."""
        _, unseen = self._unseen(sequences)
        self._held.append((self._hidden, self._new_pairs(unseen)))
        self._num_held = unseen

    def _new_pairs(self, unseen: list[int]) -> list[int]:
        """Of each request, pairs that the cache lacks and no held features are of."""
        return [n - held for n, held in zip(unseen, self._num_held, strict=True)]

    def _join_held(self, sequences: Sequences) -> None:
        """Have the features of all pairs that the cache lacks in one tensor."""
        if self._held:
            new = self._new_pairs(self._unseen(sequences)[1])
            self._hidden, self._held = self._joined([*self._held, (self._hidden, new)]), []
            self._num_held = [0] * sequences.batch

    def _run_unseen(self, sequences: Sequences) -> Tensor:
        self._join_held(sequences)
        return super()._run_unseen(sequences)

    def _joined(self, parts: list[tuple[Tensor, list[int]]]) -> Tensor:
        """The features of every request behind one another: of each part as many as the request has there."""
        places: list[list[int]] = [[] for _ in self._known]
        first = 0
        for hidden, counts in parts:
            for place, count in zip(places, counts, strict=True):
                place += range(first, first + count)
            first += hidden.shape[1]
        return kept_rows(torch.cat([hidden for hidden, _ in parts], 1), padded(places, hidden.device).clamp(min=0))

    def _run(self, token_ids: Tensor, inputs: dict[str, Any], *before: Tensor, keep: Sequence[int] | int = 0) -> Tensor:
        """Features; `before` are those of the parents, or else the target's."""
        count = token_ids.shape[1]
        features = before[0] if before else self.head.fuse(self._hidden[:, :count])
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        return kept_rows(self.head(token_ids, features, positions, mask, self._cache), keep)

    def _logits(self, features: Tensor) -> Tensor:
        """Next-token logits of features."""
        return self.timed(self.head.logits, features)

    def _draw(
        self, logits: Tensor, sequences: Sequences, ahead: int, count: int = 1, lanes: Tensor | None = None
    ) -> SampleResult:
        """The `count` best ids of a race on each row; their log-probabilities are those at temperature 1.

        Args:
            logits: ``[batch * rows, draft_vocab]``.
            sequences: names the noise.
            ahead: how far the drawn tokens are from the next one.
            count: ids a row.
            lanes: ``[batch * rows]``: rank of each row's node in its depth, for rules that draw; None: nodes are alone
                there.
        """
        rows = logits.shape[0] // sequences.batch
        if rows not in self._races:
            self._races[rows] = Race(self._race, sequences, [0] * rows, has_step=self._is_drawn)
        race, is_drawn = self._races[rows], self._is_drawn
        return sample(
            logits,
            sampling=race.distribution,
            rng=race.rng(sequences, ahead),
            purpose="draft" if is_drawn else "target",
            num_samples=count,
            lane=0 if lanes is None or not is_drawn else lanes,
            token_map=self.head.token_map,
            logprobs="raw",
        )
