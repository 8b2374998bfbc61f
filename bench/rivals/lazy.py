"""PyTorch by somebody who counts: a log-sum a row, the residual of one row a request, an exponential race.

With top-k or top-p it would sort as `eager` does; topk.py is its spelling where top-k is set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import Sampling

from .eager import assemble, available, scaled, version

__all__ = ["available", "version"]

NAME = "lazy eager"
WHY = "PyTorch with the least work: one log-sum per row, probabilities of one row per request"
ORDER = 1


def supports(case: object) -> str | None:
    """None, or why the case is not for it."""
    sorts = "top-" in getattr(case, "filters", "")
    return "sorts like eager where a top filter is on; topk.py is its spelling there" if sorts else None


def race(weights: Tensor) -> Tensor:
    """One index a row with probability proportional to its weight."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True)


def verify_chain(
    draft_ids: Tensor, target_logits: Tensor, draft_logits: Tensor, sampling: Sampling, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(token ids [batch, draft + 1], number accepted [batch])."""
    batch, draft = draft_ids.shape
    if not sampling.has_filters:
        # Nothing full-size but what logsumexp needs: the division by T is done on its result's inputs once.
        target, drafted = target_logits.float(), draft_logits.float()
        assert sampling.temperature is not None
        inverse = (1 / sampling.temperature)[:, None, None]
        target, drafted = target * inverse, drafted * inverse
    else:
        target = scaled(target_logits, sampling)
        drafted = scaled(draft_logits, sampling)
    target_sum, draft_sum = target.logsumexp(-1), drafted.logsumexp(-1)
    ids = draft_ids[..., None]
    log_p = target[:, :draft].gather(-1, ids).squeeze(-1) - target_sum[:, :draft]
    log_q = drafted.gather(-1, ids).squeeze(-1) - draft_sum
    if uniforms is None:
        uniforms = torch.rand_like(log_p)
    count = (uniforms < (log_p - log_q).exp()).cumprod(-1).sum(-1)
    request = torch.arange(batch, device=count.device)
    p = (target[request, count] - target_sum[request, count, None]).exp()
    last = count.clamp(max=draft - 1)
    q = (drafted[request, last] - draft_sum[request, last, None]).exp()
    weights = (p - q * (count < draft)[:, None]).clamp(min=0)
    return assemble(draft_ids, count, race(weights)), count


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """Token ids [batch, 1] from [batch, vocab]: the Gumbel race over scaled logits, no softmax."""
    x = scaled(logits[:, None], sampling)[:, 0]
    return (x - torch.empty_like(x).exponential_().log()).argmax(-1, keepdim=True)
