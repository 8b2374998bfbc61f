"""Drafts that share the target's noise: how often both races have the same winner (rule ``match``)."""

from __future__ import annotations

import torch
from torch import Tensor


def match_probability(p: Tensor, q: Tensor) -> Tensor:
    """P(same winner) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) over ids of both supports. Rows [vocab]."""
    both = (p > 0) & (q > 0)
    a, b = p[both], q[both]
    return (1 / torch.maximum(p / a[:, None], q / b[:, None]).sum(-1)).sum()


def match_bounds(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """(lower, upper): (1 - TV) / (1 + TV) <= P(match) <= 1 - TV."""
    variation = (p - q).clamp(min=0).sum(-1)
    return (1 - variation) / (1 + variation), 1 - variation


def match_floor(p: Tensor, q: Tensor) -> Tensor:
    """A tight lower bound of P(match): sum_i m_i / (m_i + sum_j M_j - M_i), m = min(p, q), M = max(p, q).

    Example:
        >>> import torch
        >>> from specdec_lab.theory import match_floor
        >>> float(match_floor(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])))
        0.5
    """
    low, high = torch.minimum(p, q), torch.maximum(p, q)
    return (low / (low + high.sum(-1, keepdim=True) - high).clamp(min=1e-300)).sum(-1)


def minhash_match(p: Tensor, q: Tensor) -> Tensor:
    """P(match) of weighted MinHash, the lower bound itself: sum min(p, q) / sum max(p, q)."""
    return torch.minimum(p, q).sum(-1) / torch.maximum(p, q).sum(-1)


def list_match_bound(p: Tensor, q: Tensor, count: int) -> Tensor:
    """Lower bound of P(the target's winner is among K drafts), each draft with noise of its own. Rows [vocab].

    K sum_j 1 / (sum_i max(p_i / p_j, q_i / q_j) + (K - 1) / p_j): the target takes the least noise at each id.
    """
    both = (p > 0) & (q > 0)
    a, b = p[both], q[both]
    return count * (1 / (torch.maximum(p / a[:, None], q / b[:, None]).sum(-1) + (count - 1) / a)).sum()
