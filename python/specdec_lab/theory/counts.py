"""How many tokens a step yields, and how long a draft should be, where each draft is accepted with probability P.

N drafts a step; c is the time of a draft in units of a verification. Every function takes numbers or tensors that
broadcast, and holds at the limits P = 0, P = 1 and N = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_loop.statistics import Number, expected_tokens


def _double(x: Number) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def recursion(rate: Number, draft: int) -> Tensor:
    """The same as a recursion from the last draft back: E_N = 0, E_k = P (1 + E_{k+1})."""
    p = _double(rate)
    expected = torch.zeros_like(p)
    for _ in range(draft):
        expected = p * (1 + expected)
    return expected


def accepted_distribution(rate: Number, draft: int) -> Tensor:
    """P(A = k), k = 0..N, in a last dimension: P^k (1 - P) for k < N, P^N for N."""
    p = _double(rate)[..., None]
    k = torch.arange(draft + 1, dtype=torch.float64)
    return p**k * torch.where(k < draft, 1 - p, 1.0)


def throughput(rate: Number, draft: Number, draft_time: Number, verify_time: Number) -> Tensor:
    """Tokens a unit of time: E[tokens] / (N draft_time + verify_time)."""
    return expected_tokens(rate, draft) / (_double(draft) * _double(draft_time) + _double(verify_time))


def speedup(rate: Number, draft: Number, cost: Number) -> Tensor:
    """Against plain decoding, whose token costs one verification: E[tokens] / (N c + 1)."""
    return throughput(rate, draft, cost, 1.0)


def operations(rate: Number, draft: Number, cost: Number) -> Tensor:
    """Arithmetic a token against plain decoding, c the draft's in units of the target's: (N c + N + 1) / E[tokens]."""
    n = _double(draft)
    return (n * _double(cost) + n + 1) / expected_tokens(rate, draft)


def continuous_draft(rate: Number, cost: Number) -> Tensor:
    """Real N of largest speed-up: (-W(-exp(-1 - a (1/c - 1))) - 1) / a - 1/c, a = -ln P, W Lambert's, branch -1.

    0 where a draft never pays (P <= c), infinity where P = 1 or drafts are free.
    """
    p, c = torch.broadcast_tensors(_double(rate), _double(cost))
    pays = (p > c) & (p < 1) & (c > 0)
    a = -torch.where(pays, p, 0.5).log()
    inverse = 1 / torch.where(pays, c, 0.25)
    best = (-_lambert_below(-1 - a * (inverse - 1)) - 1) / a - inverse
    endless = (p > c) & ((p >= 1) | (c <= 0))
    return torch.where(endless, torch.inf, torch.where(pays, best.clamp(min=0), 0.0))


def _lambert_below(log_x: Tensor) -> Tensor:
    """W_-1(-exp(log_x)) for log_x <= -1: w e^w = -exp(log_x), that is v - ln v = -log_x for v = -w >= 1."""
    target = -log_x
    v = target + torch.log(target.clamp(min=1)) + torch.sqrt((2 * (target - 1)).clamp(min=0))
    for _ in range(60):  # Newton on a convex function from above: it never overshoots
        step = (v - v.log() - target) / (1 - 1 / v).clamp(min=1e-12)
        v = (v - step).clamp(min=1.0)
    return -v


def optimal_draft(rate: Number, cost: Number, *, longest: int = 1000) -> Tensor:
    """Integer N in [0, longest] of largest speed-up, the smallest of equals.

    One more draft pays while P^(N+1) (1 - P) (N c + 1) > c (1 - P^(N+1)); the speed-up has a single peak.
    """
    real = continuous_draft(rate, cost).clamp(max=longest)
    low, high = real.floor(), real.ceil()
    return torch.where(speedup(rate, high, cost) > speedup(rate, low, cost), high, low).long()
