"""A smaller language model that drafts a chain, token by token, on a cache of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec_kernels import DrawPurpose, Sampling, sample

from ..attention import forward
from ..lean import LeanLlama
from ..sequences import Sequences
from .base import ARGMAX_RULES, CHAIN_RULES, Confidence, Draft, kept_rows
from .cached_drafter import CachedDrafter


class DraftModel(CachedDrafter):
    """Drafts by a transformers causal LM.

    Under ``ratio`` and ``block`` a draft has noise of its own; under ``match`` it shares the target's, so that equal
    distributions draw equal tokens; under the other rules it is an argmax.
    """

    rules: ClassVar[Collection[str]] = CHAIN_RULES

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

        Raises:
            ValueError: the model is none, or the token_map no tensor of int32.
        """
        if not hasattr(model, "config"):
            raise ValueError(f"DraftModel: model must be a transformers causal LM, got {type(model).__name__}")
        if token_map is not None and (got := getattr(token_map, "dtype", type(token_map).__name__)) != torch.int32:
            raise ValueError(f"DraftModel: token_map must be a tensor of int32 [draft_vocab], got {got}")
        self.model, self.sampling, self.token_map = model, sampling, token_map
        self.networks = (model,)
        self.vocab = model.config.get_text_config(decoder=True).vocab_size if token_map is None else None
        self._confidence = Confidence(confidence)
        if token_map is not None:
            self._sorted, self._column = token_map.long().sort()

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Make the cache; `prefill` runs the prompts."""
        is_argmax = rule in ARGMAX_RULES
        greedy = Sampling.full(sequences.batch, temperature=0.0, device=sequences.tokens.device)
        self._distribution = greedy if is_argmax else self.sampling or sampling
        self._confidence.begin(self._distribution.temperature)
        self._purpose: DrawPurpose = "target" if rule == "match" else "draft"
        self._needs_distribution = rule in ("ratio", "block")
        capacity = self._open(self.model.config, sequences, longest, self.model.dtype, self.model.device)
        self._lean = LeanLlama(self.model) if LeanLlama.suits(self.model) else None
        if self._lean is not None:
            self._lean.reach(capacity)

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """One forward a token."""
        out, rows, drawn = self._run_unseen(sequences), [], []
        self._confidence.start(sequences)
        with self.grammars.chain():
            for ahead in range(length):
                rows.append(self.grammars.restrict(out[:, 0], self.token_map))
                drawn.append(
                    sample(
                        rows[-1],
                        sampling=self._distribution,
                        rng=sequences.rng(ahead),
                        purpose=self._purpose,
                        token_map=self.token_map,
                        logprobs="raw",
                    )
                )
                if ahead + 1 == length or self._confidence.is_lost(rows[-1], drawn[-1]):
                    break
                self.grammars.follow(drawn[-1].token_ids)
                out = self._run_next(drawn[-1].token_ids)
        ids = self._of_running(torch.cat([d.token_ids for d in drawn], 1), sequences)
        if not self._needs_distribution:
            return Draft(ids)
        stats = torch.stack([d.logsumexp for d in drawn], 1), torch.stack([d.threshold for d in drawn], 1)
        return Draft(ids, torch.stack(rows, 1), stats, self._distribution, self.token_map)

    def _run(self, token_ids: Tensor, inputs: dict[str, Any], *before: Tensor, keep: Sequence[int] | int = 0) -> Tensor:
        """Logits."""
        if isinstance(keep, int):
            return self._logits(token_ids, inputs, keep)
        rows = sorted(set(keep))
        some = torch.tensor(rows).to(token_ids.device, non_blocking=True)
        return kept_rows(self._logits(token_ids, inputs, some), [rows.index(row) for row in keep])

    def _logits(self, token_ids: Tensor, inputs: dict[str, Any], keep: int | Tensor) -> Tensor:
        if self._lean is not None:
            return self._lean(self._own(token_ids), inputs, keep)
        logits: Tensor = forward(self.model, self._own(token_ids), inputs, logits_to_keep=keep).logits
        return logits

    def _own(self, ids: Tensor) -> Tensor:
        """Target ids as the model knows them."""
        if self.token_map is None:
            return ids.clamp(min=0)
        nearest = torch.searchsorted(self._sorted, ids.contiguous()).clamp(max=len(self._sorted) - 1)
        return torch.where(self._sorted[nearest] == ids, self._column[nearest], 0)
