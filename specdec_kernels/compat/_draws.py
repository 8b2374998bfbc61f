"""Shared by the compatible interfaces: acceptance by given coins, and a draw from the weights of one row a request."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(weights: Tensor, coin: Tensor, fallback: Tensor) -> Tensor:
    """Index of each row by inversion, never one of weight 0; rows without mass are drawn from the fallback."""
    empty = weights.sum(-1) <= 0
    weights = torch.where(empty[:, None], fallback, weights)
    mass = weights.double().cumsum(-1)
    index = torch.searchsorted(mass, (coin.double() * mass[:, -1])[:, None], right=True)[:, 0]
    last = weights.shape[-1] - 1 - (weights > 0).byte().flip(-1).argmax(-1)  # rounding must not lead behind it
    return torch.minimum(index, last)


def gathered(probs: Tensor, ids: Tensor) -> Tensor:
    """Probability of each id under its row; 0 for an id outside the vocabulary."""
    inside = (ids >= 0) & (ids < probs.shape[-1])
    found = probs.gather(-1, ids.clamp(0, probs.shape[-1] - 1)[..., None])[..., 0]
    return torch.where(inside, found, 0.0)


def chain(ids: Tensor, target: Tensor, draft: Tensor, coins: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(accepted drafts, next token, which drafts would pass one by one) of the ratio test."""
    steps = ids.shape[1]
    p, q = gathered(target[:, :steps], ids), gathered(draft, ids)
    passes = (q > 0) & (q <= 1) & (coins * q < p)
    count = passes.long().cumprod(1).sum(1)
    return count, correction(target, draft, count, torch.ones_like(last), last), passes


def block(ids: Tensor, target: Tensor, draft: Tensor, coins: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """(accepted drafts, next token) of block verification (Sun et al. 2024, algorithm 2)."""
    steps = ids.shape[1]
    if not steps:
        return chain(ids, target, draft, coins, last)[:2]
    p, q = gathered(target[:, :steps], ids), gathered(draft, ids)
    ratio = torch.where((q > 0) & (q <= 1), p / q, 0.0)
    scales, scale = [], torch.ones_like(p[:, 0])
    for i in range(steps):
        scale = (scale * ratio[:, i]).clamp(max=1.0)
        scales.append(scale)
    prefix = torch.stack(scales, 1)
    mass = (prefix[:, :-1, None] * target[:, 1:steps] - draft[:, 1:]).clamp(min=0).sum(-1)
    accept = torch.where(prefix[:, :-1] < 1, mass / (mass + 1 - prefix[:, :-1]), 1.0)
    accept = torch.cat([accept, prefix[:, -1:]], 1)
    place = torch.arange(1, steps + 1, device=ids.device)
    count = torch.where(coins < accept, place, 0).amax(1)
    prefix = torch.nn.functional.pad(prefix, (1, 0), value=1.0)
    return count, correction(target, draft, count, prefix.gather(1, count[:, None])[:, 0], last)


def correction(target: Tensor, draft: Tensor, count: Tensor, scale: Tensor, coin: Tensor) -> Tensor:
    """The token behind the accepted prefix: from norm((scale p - q)+), from p where everything was accepted."""
    row = torch.arange(len(count), device=count.device)
    p, q = target[row, count].float(), torch.zeros((), dtype=torch.float32, device=count.device)
    if draft.shape[1]:
        q = draft[row, count.clamp(max=draft.shape[1] - 1)].float()
        q = torch.where((q >= 0) & (q <= 1) & (count < draft.shape[1])[:, None], q, 0.0)
    return draw((scale[:, None] * p - q).clamp(min=0), coin, p)
