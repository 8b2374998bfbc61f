"""SGLang's chain sampler (Triton), with the softmax that its `eagle_sample` runs before it.

Draft probabilities are kept by its drafter in float32 and not in its time. Its top-k/top-p are FlashInfer kernels
that rewrite the probabilities; without a GPU only the unfiltered case is metered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Sampling

from . import _sglang
from ._sglang import version
from .eager import scaled

__all__ = ["version"]
NAME = "SGLang chain"
WHY = "SGLang's rejection sampling for EAGLE chains, in Triton"
ORDER = 9
FILE = "kernels/ops/speculative/reject_sampling.py"


def available() -> str | None:
    """None, or why it cannot run here."""
    return _sglang.available(FILE)


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    return None if case.filters == "none" else "its filters are FlashInfer's, on the probabilities"


def prepare(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling) -> tuple[Any, ...]:
    """(target logits, draft probabilities, temperature)."""
    return target_logits, scaled(draft_logits, sampling).softmax(-1), sampling.temperature


def verify_prepared(draft_ids: Tensor, prepared: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """(token ids, number accepted)."""
    logits, draft_probs, temperature = prepared
    batch, draft = draft_ids.shape
    slots, device = draft + 1, draft_ids.device
    probs = (logits.float() / temperature[:, None, None]).softmax(-1)
    candidates = torch.cat([draft_ids.new_zeros(batch, 1), draft_ids], 1)
    index = torch.arange(batch * slots, device=device).view(batch, slots)
    predicts = torch.zeros(batch * slots, dtype=torch.int32, device=device)
    accepted = torch.full((batch, slots), -1, dtype=torch.int32, device=device)
    count = torch.zeros(batch, dtype=torch.int32, device=device)
    coins = torch.rand(batch, slots, device=device)
    last = torch.rand(batch, device=device)
    _sglang.load(FILE).chain_speculative_sampling_triton(
        predicts, accepted, count, candidates, index, index, index, coins, last, probs, draft_probs, 1.0, 1.0, True
    )
    return predicts.view(batch, slots).long(), count.long()
