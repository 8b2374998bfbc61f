"""What all drafters share that continue the target's features: the head's cache, and the pairs it has not seen yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Noise, SampleResult, Sampling, gather_nodes, sample

from ..heads import FeatureHead
from ..text import Text
from ..tree_cache import TreeCache
from .base import COLD, Confidence, Drafter, Outcome

DRAWN_RULES = ("ratio", "block", "recursive", "traversal")  # their drafts are drawn from the head's law


class FeatureDrafter(Drafter):
    """Keeps the head's cache in step with the text; what is drafted is its subclasses' affair.

    Row i of the head's cache is the pair (feature i, token i + 1). A text of n tokens, the last of which the target has
    not seen, has n - 1 pairs; those that the last step added are run and committed when a draft begins, and the last of
    them tells the first drafts. Drafted nodes hang from it and are dropped when the next draft begins.
    """

    def __init__(self, head: FeatureHead, *, sampling: Sampling | None = None, confidence: float = 0.0) -> None:
        """Draft with `head`.

        Args:
            head: on the target's device.
            sampling: of drafts that are drawn, or that race with the target's noise; None: the target's.
            confidence: end drafts where their chance falls below, see `Confidence`.
        """
        self.head, self.sampling, self.features = head, sampling, head.levels
        self._confidence = Confidence(confidence)

    def begin(self, text: Text, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Make the cache; `prefill` brings the prompts."""
        self._is_drawn, self._law = rule in DRAWN_RULES, self.sampling or sampling
        follows_law = self._is_drawn or rule == "match"
        self._race = with_runners_up(self._law if follows_law else Sampling(temperature=torch.zeros(text.batch)), text)
        self._confidence.begin(self._race.temperature)
        some, capacity = next(self.head.parameters()), text.tokens.shape[1] + self._rows(longest)
        self.head.reach(capacity)
        self._cache = TreeCache(
            self.head.config,
            batch=text.batch,
            capacity=capacity,
            dtype=some.dtype,
            device=some.device,
        )
        self._drafted = 0  # rows of the cache behind the pairs
        self._inputs: dict[str, Any] = {}  # of the last nodes

    def prefill(self, text: Text, hidden: Tensor) -> None:
        """Run the prompts' pairs but for their last."""
        count = text.longest - 2
        if count > 0:
            positions = torch.arange(count, device=hidden.device)[None]
            features = self.head.fuse(hidden[:, :count])
            self.head(text.tokens[:, 1 : 1 + count], features, positions, cache=self._cache)
            self._cache.commit((text.lengths - 3).clamp(min=-1).int())
        last = (text.lengths - 2).clamp(min=0)[:, None, None]  # a text of one token has no pair: its first row was bad
        self._hidden, self._new = hidden.gather(1, last.expand(-1, -1, hidden.shape[2])), (text.lengths > 1).long()
        self._pairs = [max(end - 2, 0) for end in text.ends]  # of each request, as the host knows

    def commit(self, text: Text, outcome: Outcome) -> None:
        """Note the pairs that the step adds."""
        assert outcome.hidden is not None
        self._hidden = outcome.hidden if outcome.path is None else gather_nodes(outcome.hidden, outcome.path).values
        self._new = outcome.kept

    def _run_pairs(self, text: Text) -> Tensor:
        """Run the new pairs; the feature of each text's last, ``[batch, 1, hidden]``."""
        self._cache.crop(-self._drafted)
        self._drafted = 0
        ends = [end - 1 for end in text.ends]
        counts = [end - n for end, n in zip(ends, self._pairs, strict=True)]  # a finished request has none
        self._pairs, count = ends, max(1, *counts)
        is_even = min(ends) == max(ends) and min(counts) == count  # no request needs a place of its own
        if is_even:
            token_ids = text.tokens.narrow(1, text.ends[0] - count, count)
        else:
            place = (text.lengths - self._new)[:, None] + torch.arange(count, device=text.lengths.device)
            token_ids = text.tokens.gather(1, place.clamp(max=text.tokens.shape[1] - 1))
        out = self._run(self._cache.chain_inputs(count), token_ids, self.head.fuse(self._hidden[:, :count]))
        self._cache.commit(count - 1 if is_even else (self._new - 1).int())
        self._cache.know_lengths(ends)
        if is_even:
            return out[:, -1:]
        last = (self._new.long() - 1).clamp(min=0)[:, None, None]
        return out.gather(1, last.expand(-1, -1, out.shape[2]))

    def _run_next(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """Run one more token ``[batch, 1]`` of a chain; the next features."""
        out = self._run(self._cache.chain_inputs(1), token_ids, features)
        self._drafted += 1
        return out

    def _run_nodes(self, token_ids: Tensor, features: Tensor, parents: Tensor | None) -> Tensor:
        """Run nodes of a tree whose parents are rows of the last run, or the texts themselves; the next features."""
        count = token_ids.shape[1]
        root = self._cache.sibling_inputs
        self._inputs = root(count) if parents is None else self._cache.child_inputs(self._inputs, parents)
        out = self._run(self._inputs, token_ids, features)
        self._drafted += count
        return out

    def _run(self, inputs: dict[str, Any], token_ids: Tensor, features: Tensor) -> Tensor:
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        if positions is None:
            assert token_ids.shape[1] == 1  # all lengths are the same
            positions = self._cache.lengths[:1, None] + self._drafted
        out: Tensor = self.head(token_ids, features, positions, mask, self._cache)
        return out

    def _draw(
        self, logits: Tensor, text: Text, ahead: int, count: int = 1, ranks: Tensor | None = None
    ) -> SampleResult:
        """The `count` best ids of a race on each row; their log-probabilities are those at temperature 1.

        Args:
            logits: ``[batch * rows, draft_vocab]``.
            text: names the noise.
            ahead: how far the drawn tokens are from the next one.
            count: ids a row.
            ranks: ``[rows]``: rank of each row's node in its depth; None: one row a request.
        """
        noise, law = text.noise(ahead), self._race
        lane: int | Tensor = 0
        if ranks is not None and len(ranks) > 1:
            rows = len(ranks)
            noise = Noise(*(None if x is None else x.repeat_interleave(rows) for x in noise))  # type: ignore[arg-type]
            law = Sampling(*(None if x is None else x.repeat_interleave(rows) for x in law))
            lane = ranks.repeat(text.batch) if self._is_drawn else 0
        return sample(
            logits,
            sampling=law,
            noise=noise,
            purpose="draft" if self._is_drawn else "target",
            num_samples=count,
            lane=lane,
            token_map=self.head.token_map,
            logprobs="raw",
        )

    def _of_running(self, ids: Tensor, text: Text) -> Tensor:
        """Drafts ``[batch, ...]``, none for a finished text that took nothing new."""
        if not any(text.is_finished):
            return ids
        return ids.masked_fill((self._new == 0).view(-1, *[1] * (ids.dim() - 1)), -1)

    def _rows(self, longest: int) -> int:
        """Most rows written between two commits: the new pairs and the drafted nodes."""
        return 2 * self.nodes(longest)


def with_runners_up(law: Sampling, text: Text) -> Sampling:
    """The law for a race whose runners-up are wanted too: where it is an argmax, the largest logits in order."""
    device = text.tokens.device
    if law.temperature is None:
        return law
    temperature = law.temperature.to(device)
    is_argmax = temperature < COLD
    return Sampling(
        temperature=temperature.clamp(min=COLD),
        top_k=None if law.top_k is None else torch.where(is_argmax, 0, law.top_k),
        top_p=None if law.top_p is None else torch.where(is_argmax, 1.0, law.top_p),
        min_p=None if law.min_p is None else torch.where(is_argmax, 0.0, law.min_p),
    )
