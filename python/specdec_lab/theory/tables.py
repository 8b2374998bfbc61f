"""Accepted tokens where the distributions differ from place to place: exact, by enumeration of all drafts.

A table is a function of the tokens so far (a tuple) that gives the distribution of the next one (a float64 tensor
[vocab]).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Table = Callable[[tuple[int, ...]], Tensor]


def _weighted(target: Table, draft: Table, length: int, weigh: Callable[[float, float], float]) -> float:
    """sum_i E[w_i] over drafted prefixes of 1..length tokens: w_0 = 1, w_i = weigh(w_{i-1}, p / q)."""

    @cache
    def below(prefix: tuple[int, ...], weight: float) -> float:
        if len(prefix) == length:
            return 0.0
        p, q = target(prefix).tolist(), draft(prefix).tolist()
        total = 0.0
        for x, (px, qx) in enumerate(zip(p, q, strict=True)):
            if qx > 0:
                w = weigh(weight, px / qx)
                total += qx * (w + below((*prefix, x), w))
        return total

    return below((), 1.0)


def chain_accepted(target: Table, draft: Table, length: int) -> float:
    """E[A] of rule ``ratio``: sum_i E[prod_{j <= i} min(1, p_j / q_j)]."""
    return _weighted(target, draft, length, lambda w, ratio: w * min(1.0, ratio))


def block_accepted(target: Table, draft: Table, length: int) -> float:
    """E[A] of rule ``block``: sum_i E[w_i], w_i = min(1, w_{i-1} p_i / q_i) (Sun et al.).

    Example:
        >>> import torch
        >>> from specdec_lab.theory import block_accepted
        >>> p, q = torch.tensor([1.0, 2.0]).double() / 3, torch.tensor([2.0, 1.0]).double() / 3
        >>> round(block_accepted(lambda _: p, lambda _: q, 2) * 9)
        11
    """
    return _weighted(target, draft, length, lambda w, ratio: min(1.0, w * ratio))


def block_chances(p: Tensor, q: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(w_0..w_g, h_1..h_g) of one drafted block; rows p and q ``[g, vocab]``, ids ``[g]``.

    w_0 = 1, w_i = min(1, w_{i-1} p_i / q_i); h_g = w_g and h_i = S_i / (S_i + 1 - w_i), S_i = sum (w_i p_{i+1} -
    q_{i+1})+ (0 / 0 is 1). The last i whose coin is below h_i is the number accepted: P(at least i | x_1..x_i) = w_i.
    """
    w = [torch.ones((), dtype=torch.float64)]
    for row_p, row_q, x in zip(p, q, ids, strict=True):
        w.append((w[-1] * row_p[x] / row_q[x]).clamp(max=1))
    chances = []
    for weight, row_p, row_q in zip(w[1:-1], p[1:], q[1:], strict=True):
        left = (weight * row_p - row_q).clamp(min=0).sum()
        whole = left + 1 - weight
        chances.append(torch.where(whole > 0, left / whole.clamp(min=1e-300), 1.0))
    return torch.stack(w), torch.stack([*chances, w[-1]])


def ideal_accepted(target: Table, draft: Table, length: int) -> float:
    """Upper bound of every verifier: sum_i (1 - TV of the joint distributions of i tokens)."""
    joint: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 1.0)}
    total = 0.0
    for _ in range(length):
        longer: dict[tuple[int, ...], tuple[float, float]] = {}
        for prefix, (p, q) in joint.items():
            for x, (px, qx) in enumerate(zip(target(prefix).tolist(), draft(prefix).tolist(), strict=True)):
                longer[(*prefix, x)] = p * px, q * qx
        joint = longer
        total += sum(min(p, q) for p, q in joint.values())
    return total


def constant(distribution: Tensor) -> Table:
    """The same distribution everywhere."""
    fixed = distribution.to(torch.float64)
    return lambda _: fixed
