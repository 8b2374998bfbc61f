"""PyTorch with the filters spelled top-k first: torch.topk, then top-p among the k, then only k numbers a row.

The best that plain PyTorch can do where top-k is set: no sort of the vocabulary, probabilities of k ids a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import Sampling

from .eager import assemble, available, version
from .lazy import race

__all__ = ["available", "version"]

NAME = "topk-first eager"
WHY = "PyTorch with `torch.topk` before top-p, so that nothing sorts the vocabulary; needs top-k"
ORDER = 2
HAS_ONE_TOP_K = True


def supports(case: object) -> str | None:
    """None, or why the case is not for it."""
    return None if "top-k" in getattr(case, "filters", "") else "needs top-k"


def kept(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(probabilities, ids), each [batch, row, k]; top_k is an int, which torch.topk wants: one for the batch."""
    temperature, top_k, top_p, min_p, _ = sampling
    values, ids = logits.topk(top_k, dim=-1)
    probs = (values.float() / temperature[:, None, None]).softmax(-1)
    if top_p is not None:
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(before >= top_p[:, None, None], 0)
        probs = probs / probs.sum(-1, keepdim=True)
    if min_p is not None:
        probs = probs.masked_fill(probs < min_p[:, None, None] * probs[..., :1], 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs, ids


def verify_chain(
    draft_ids: Tensor, target_logits: Tensor, draft_logits: Tensor, sampling: Sampling, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(token ids [batch, draft + 1], number accepted [batch])."""
    batch, draft = draft_ids.shape
    target, target_ids = kept(target_logits, sampling)
    drafted, drafted_ids = kept(draft_logits, sampling)
    p = (target[:, :draft] * (target_ids[:, :draft] == draft_ids[..., None])).sum(-1)
    q = (drafted * (drafted_ids == draft_ids[..., None])).sum(-1)
    if uniforms is None:
        uniforms = torch.rand_like(p)
    count = (uniforms * q < p).cumprod(-1).sum(-1)
    request = torch.arange(batch, device=count.device)
    row, ids = target[request, count], target_ids[request, count]
    last = count.clamp(max=draft - 1)
    same = ids[:, :, None] == drafted_ids[request, last][:, None, :]
    minus = (same * drafted[request, last][:, None, :]).sum(-1) * (count < draft)[:, None]
    drawn = ids.gather(1, race((row - minus).clamp(min=0)))
    return assemble(draft_ids, count, drawn), count


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """Token ids [batch, 1] from [batch, vocab]."""
    probs, ids = kept(logits[:, None], sampling)
    return ids[:, 0].gather(1, race(probs[:, 0]))
