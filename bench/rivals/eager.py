"""Plain PyTorch: softmax of every row, ratio test, residual of every row, multinomial; filters by a full sort.

This is the textbook spelling (Leviathan et al., algorithm 1, batched) and, where filters are on, the one of vLLM's and
transformers' PyTorch paths: sort, mask the tail, scatter back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import Sampling

NAME = "eager"
WHY = "the textbook algorithm in PyTorch: softmax of every row, filters by a full sort"
ORDER = 0


def version() -> str:
    """Of the rival."""
    return f"torch {torch.__version__}"


def available() -> str | None:
    """None, or why it cannot run here."""
    return None


def supports(case: object) -> str | None:
    """None, or why the case is not for it."""
    return None


def scaled(logits: Tensor, sampling: Sampling) -> Tensor:
    """float32 logits [batch, row, vocab] over temperature, -inf where a filter drops."""
    temperature, top_k, top_p, min_p, _ = sampling
    assert temperature is not None
    logits = logits.float() / temperature[:, None, None]
    if min_p is not None:
        probs = logits.softmax(-1)
        dropped = probs < min_p[:, None, None] * probs.amax(-1, keepdim=True)
        logits = logits.masked_fill(dropped, -torch.inf)
    if top_k is None and top_p is None:
        return logits
    ranked, order = logits.sort(dim=-1)
    if top_k is not None:
        index = (logits.shape[-1] - top_k.long())[:, None, None].expand(-1, logits.shape[1], 1)
        ranked = ranked.masked_fill(ranked < ranked.gather(-1, index), -torch.inf)
    if top_p is not None:
        dropped = ranked.softmax(-1).cumsum(-1) <= 1 - top_p[:, None, None]
        dropped[..., -1] = False
        ranked = ranked.masked_fill(dropped, -torch.inf)
    return torch.empty_like(ranked).scatter_(-1, order, ranked)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """float32 [batch, row, vocab]."""
    return scaled(logits, sampling).softmax(-1)


def verify_chain(
    draft_ids: Tensor, target_logits: Tensor, draft_logits: Tensor, sampling: Sampling, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(token ids [batch, draft + 1], number accepted [batch])."""
    target = probabilities(target_logits, sampling)
    drafted = probabilities(draft_logits, sampling)
    return ratio_test(draft_ids, target, drafted, uniforms)


def ratio_test(
    draft_ids: Tensor, target: Tensor, drafted: Tensor, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(token ids [batch, draft + 1], number accepted [batch]) from probabilities."""
    batch, draft = draft_ids.shape
    p = target[:, :draft].gather(-1, draft_ids[..., None]).squeeze(-1)
    q = drafted.gather(-1, draft_ids[..., None]).squeeze(-1)
    if uniforms is None:
        uniforms = torch.rand_like(p)
    accepted = (uniforms < p / q).cumprod(-1)
    count = accepted.sum(-1)
    residual = (target[:, :draft] - drafted).clamp(min=0)
    residual = residual / residual.sum(-1, keepdim=True).clamp(min=1e-30)
    distributions = torch.cat([residual, target[:, draft:]], dim=1)
    drawn = torch.multinomial(distributions[torch.arange(batch, device=count.device), count], 1)
    return assemble(draft_ids, count, drawn), count


def assemble(draft_ids: Tensor, count: Tensor, drawn: Tensor) -> Tensor:
    """Accepted prefix, one drawn token, then -1."""
    place = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    padded = torch.cat([draft_ids, drawn], dim=1)
    return torch.where(place < count[:, None], padded, torch.where(place == count[:, None], drawn, -1))


def verify_greedy(draft_ids: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Rule greedy."""
    best = target_logits.argmax(-1)
    count = (draft_ids == best[:, :-1]).cumprod(-1).sum(-1)
    return assemble(draft_ids, count, best.gather(1, count[:, None])), count


def verify_match(draft_ids: Tensor, target_logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Rule match: sample every target row, keep the prefix that agrees."""
    probs = (target_logits.float() / temperature[:, None, None]).softmax(-1)
    drawn = torch.multinomial(probs.flatten(0, 1), 1).view(probs.shape[:2])
    count = (draft_ids == drawn[:, :-1]).cumprod(-1).sum(-1)
    return assemble(draft_ids, count, drawn.gather(1, count[:, None])), count


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """Token ids [batch, 1] from [batch, vocab]."""
    return torch.multinomial(probabilities(logits[:, None], sampling)[:, 0], 1)


def acceptance_ratios(
    draft_ids: Tensor, target_logits: Tensor, draft_logits: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """(min(1, p / q) at the draft ids, sum min(p, q)), each [batch, draft]."""
    target = probabilities(target_logits[:, : draft_ids.shape[1]], sampling)
    drafted = probabilities(draft_logits, sampling)
    ratio = target.gather(-1, draft_ids[..., None]) / drafted.gather(-1, draft_ids[..., None])
    return ratio.squeeze(-1).clamp(max=1), torch.minimum(target, drafted).sum(-1)


def residual_probs(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(norm((p - q)+) [batch, vocab], its mass [batch])."""
    target = probabilities(target_logits[:, None], sampling)[:, 0]
    drafted = probabilities(draft_logits[:, None], sampling)[:, 0]
    residual = (target - drafted).clamp(min=0)
    mass = residual.sum(-1)
    return residual / mass[:, None], mass


def residual_sample(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling) -> Tensor:
    """Token ids [batch] from norm((p - q)+)."""
    probs, _ = residual_probs(target_logits, draft_logits, sampling)
    return torch.multinomial(probs, 1)[:, 0]
