"""A smaller language model that drafts a chain, token by token, on a cache of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Sampling, sample

from ..text import Text
from ..tree_cache import TreeCache
from .base import ARGMAX_RULES, Confidence, Draft, Drafter, Outcome


class DraftModel(Drafter):
    """Drafts by a transformers causal LM.

    Under ``ratio`` and ``block`` a draft has noise of its own; under ``match`` it shares the target's, so that equal
    laws draw equal tokens; under the other rules it is an argmax.

    The rows of the two last tokens are not in the cache: both are run when a draft begins. So a fully accepted draft,
    whose last token was drawn but never run, needs no forward of its own, and all requests are treated alike. A text of
    a single token drafts nothing in its first step.
    """

    def __init__(
        self, model: Any, *, sampling: Sampling | None = None, token_map: Tensor | None = None, confidence: float = 0.0
    ) -> None:
        """Draft with `model`.

        Args:
            model: on the target's device.
            sampling: of the drafts; None: the target's.
            token_map: int32 ``[draft_vocab]``: target id of each of the model's ids, where the vocabularies differ. A
                target id that has none is shown to the model as its id 0.
            confidence: end drafts where their chance falls below, see `Confidence`.
        """
        self.model, self.sampling, self.token_map = model, sampling, token_map
        self._confidence = Confidence(confidence)
        if token_map is not None:
            self._sorted, self._column = token_map.long().sort()

    def begin(self, text: Text, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Run the prompts but for their last two tokens."""
        is_argmax = rule in ARGMAX_RULES
        greedy = Sampling.full(text.batch, temperature=0.0, device=text.tokens.device)
        self._law = greedy if is_argmax else self.sampling or sampling
        self._confidence.begin(self._law.temperature)
        self._purpose = "target" if rule == "match" else "draft"
        self._needs_law = rule in ("ratio", "block")
        self._cache = TreeCache(
            self.model.config,
            batch=text.batch,
            capacity=text.tokens.shape[1] + self.nodes(longest),
            dtype=self.model.dtype,
            device=self.model.device,
        )
        if text.longest > 2:
            prompts = self._known(text.tokens[:, : text.longest - 2])
            self.model(prompts, **self._cache.chain_inputs(prompts.shape[1]), logits_to_keep=1)
            self._follow(text)

    def draft(self, text: Text, length: int) -> Draft:
        """One forward a token."""
        self._cache.know_lengths([max(end - 2, 0) for end in text.ends])
        rows, drawn, new = [], [], text.last(2)
        self._confidence.start(text)
        for ahead in range(length):
            inputs = self._cache.chain_inputs(new.shape[1])
            rows.append(self.model(self._known(new), **inputs, logits_to_keep=1).logits[:, -1])
            noise = text.noise(ahead)
            drawn.append(
                sample(
                    rows[-1],
                    sampling=self._law,
                    noise=noise,
                    purpose=self._purpose,
                    token_map=self.token_map,
                    logprobs="raw",
                )
            )
            new = drawn[-1].token_ids
            if ahead + 1 == length or self._confidence.is_lost(rows[-1], drawn[-1]):
                break
        ids = torch.cat([d.token_ids for d in drawn], 1).masked_fill(text.lengths[:, None] < 2, -1)
        if not self._needs_law:
            return Draft(ids)
        stats = torch.stack([d.logsumexp for d in drawn], 1), torch.stack([d.threshold for d in drawn], 1)
        return Draft(ids, torch.stack(rows, 1), stats, self._law, self.token_map)

    def commit(self, text: Text, outcome: Outcome) -> None:
        """Keep the rows of what the text kept."""
        self._follow(text)

    def _follow(self, text: Text, path: Tensor | None = None) -> None:
        """Commit rows up to the last two tokens of each text."""
        rows = text.lengths - 2 - self._cache.lengths
        self._cache.commit((rows - 1).clamp(min=-1).int(), path)

    def _known(self, ids: Tensor) -> Tensor:
        """Target ids as the model knows them."""
        if self.token_map is None:
            return ids.clamp(min=0)
        nearest = torch.searchsorted(self._sorted, ids.contiguous()).clamp(max=len(self._sorted) - 1)
        return torch.where(self._sorted[nearest] == ids, self._column[nearest], 0)
