"""vLLM's V1 rejection sampler, composed as `RejectionSampler.forward`: float32 copy, clone, softmax, recovery.

The drafter hands it float32 probabilities; they are made beforehand and not in its time.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Sampling

from . import _vllm
from .eager import scaled

NAME = "vLLM V1"
WHY = "vLLM's earlier sampler (V1), still used for some methods"
ORDER = 7
available, version = _vllm.available, _vllm.version


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    if case.filters != "none" and ("min-p" in case.filters or not torch.cuda.is_available()):
        return "min-p is refused with speculation; its top-k/top-p kernel does not interpret"
    return None


def prepare(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling) -> tuple[Any, ...]:
    """(target logits, draft probabilities, parameters)."""
    return target_logits, scaled(draft_logits, sampling).softmax(-1).flatten(0, 1).contiguous(), sampling


def verify_prepared(draft_ids: Tensor, prepared: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """(token ids, number accepted)."""
    target_logits, draft_probs, (temperature, top_k, top_p, *_) = prepared
    v1 = _vllm.load("v1.sample.rejection_sampler")
    batch, draft = draft_ids.shape
    device = draft_ids.device
    ends = torch.arange(1, batch + 1, dtype=torch.int32, device=device) * draft
    sampling = types.SimpleNamespace(
        temperature=temperature, top_k=top_k, top_p=top_p, all_greedy=False, all_random=True, generators={},
    )  # fmt: skip
    flat = target_logits.flatten(0, 1)
    rows = torch.arange(batch * (draft + 1), device=device).view(batch, draft + 1)
    bonus = flat[rows[:, -1]].float() / temperature[:, None]
    bonus_probs = bonus.softmax(-1)
    bonus_ids = (bonus_probs / torch.empty_like(bonus_probs).exponential_()).argmax(-1, keepdim=True).int()
    target = flat[rows[:, :-1].flatten()].to(torch.float32)
    target = v1.apply_sampling_constraints(target.clone(), ends, sampling)
    ids = v1.rejection_sample(
        draft_ids.int().flatten(), [draft] * batch, draft, ends, draft_probs, target, bonus_ids, sampling
    )
    return ids, (ids >= 0).sum(-1) - 1
