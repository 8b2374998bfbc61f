"""vLLM's Model Runner V2 verification, its default: float32 copy and temperature in place, then `rejection_sample`.

Composed as its `RejectionSampler._verify` does, without penalties, biases and grammars.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Sampling

from . import _vllm

NAME = "vLLM MRV2"
WHY = "vLLM's default verification (Model Runner V2), the closest rival: logits in, few kernels"
ORDER = 8
available, version = _vllm.available, _vllm.version


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    if case.filters != "none" and not torch.cuda.is_available():
        return "its top-k/top-p kernel does not interpret"
    return None


def verify_prepared(draft_ids: Tensor, prepared: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """(token ids, number accepted)."""
    flat, draft_logits, (temperature, top_k, top_p, min_p, *_), seed = prepared
    batch, draft = draft_ids.shape
    device = draft_ids.device
    request = torch.arange(batch, device=device)
    expanded = request.repeat_interleave(draft + 1)
    local = torch.arange(draft + 1, dtype=torch.int32, device=device).repeat(batch)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * (draft + 1)
    sampled = torch.zeros(batch, draft + 1, dtype=torch.int32, device=device)
    sampled[:, 1:] = draft_ids  # slot 0 holds the last committed token
    x = torch.empty_like(flat, dtype=torch.float32).copy_(flat)
    _vllm.load("v1.worker.gpu.sample.gumbel").apply_temperature(x, expanded, temperature)
    if min_p is not None:
        _vllm.load("v1.worker.gpu.sample.min_p").apply_min_p(x, expanded, min_p)
    if top_k is not None or top_p is not None:
        filters = _vllm.load("v1.sample.ops.topk_topp_sampler")
        rows = [None if f is None else f[expanded] for f in (top_k, top_p)]
        x = filters.apply_top_k_top_p(x, *rows)
    ids, count = _vllm.load("v1.worker.gpu.spec_decode.rejection_sampler_utils").rejection_sample(
        x, draft_logits, sampled.flatten(), starts, local.long(), request, expanded, local, temperature, seed, draft
    )
    return ids, count.long() - 1


def prepare(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling) -> tuple[Any, ...]:
    """Layouts as the engine holds them: flat target rows, draft logits before the temperature, a seed a request."""
    seed = torch.arange(len(target_logits), device=target_logits.device)
    return target_logits.flatten(0, 1), draft_logits, sampling, seed
