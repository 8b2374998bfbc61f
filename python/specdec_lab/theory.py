"""Formulas: how often speculative decoding rejects, and the fastest static tree.

Yin, Chen, Huang, Wang 2024; their p is the draft and their q the target, here p is the target and q the draft. Torch
float64, vectorised over rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Markov",
    "batch_rejections",
    "fastest_tree",
    "residuals",
    "total_variation",
]


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """TV = sum (p - q)+ over the last dimension: the probability that rule ``ratio`` rejects."""
    return (p - q).clamp(min=0).sum(-1)


class Markov(NamedTuple):
    """Distributions of tokens 1..T, each given the token before it.

    Attributes:
        start: float64 ``[vocab]``, distribution of the first token.
        steps: float64 ``[T - 1, vocab, vocab]``; steps[n, x] is the distribution of token n + 2 after x.
    """

    start: Tensor
    steps: Tensor

    def rows(self, n: int) -> Tensor:
        """Distributions of token n (from 1) by the token before it, ``[1 or vocab, vocab]``."""
        return self.start[None] if n == 1 else self.steps[n - 2]


def batch_rejections(target: Markov, draft: Markov, drafts: float) -> float:
    """Theorem 3: E[rejections] of Algorithm 4 with M independent drafts, M = math.inf for its limit.

    For M = 1 it is Theorem 1, sum_n E[TV(p_n, q_n)] over prefixes of p, which no lossless acceptance falls below.

    f(x_1..x_n) is the probability of that prefix with x_n emitted by a rejection, so that a fresh batch starts behind
    it. With Pi = prod_{m <= M} TV(p^m, q), p^{m+1} = norm((p^m - q)+),

        E = sum_n E[TV] - sum_n sum f [TV - Pi].
    """
    prefix = fresh = torch.ones(1, dtype=torch.float64)
    expected = 0.0
    for n in range(1, len(target.steps) + 2):
        p, q = target.rows(n), draft.rows(n)
        variation = total_variation(p, q)
        mass, last = residuals(p, q, drafts)
        expected += float((prefix * variation).sum() - (fresh * (variation - mass)).sum())
        first = (fresh * mass)[:, None] * last
        later = (prefix - fresh)[:, None] * (p - q).clamp(min=0)
        prefix, fresh = (prefix[:, None] * p).sum(0), (first + later).sum(0)
    return expected


def residuals(p: Tensor, q: Tensor, drafts: float) -> tuple[Tensor, Tensor]:
    """(Pi_M, p^{M+1}) of each row: C_0 = 0, Z_1 = 1; C_m = C_{m-1} + Z_m, Z_{m+1} = sum (p - C_m q)+ = Pi_m."""
    if math.isinf(drafts):
        outside = torch.where(q > 0, 0.0, p)
        mass = outside.sum(-1)
        return mass, outside / mass.clamp(min=1e-300)[:, None]
    scale, mass = torch.zeros_like(p[:, 0]), torch.ones_like(p[:, 0])
    left = p
    for _ in range(int(drafts)):
        scale = scale + mass
        left = (p - scale[:, None] * q).clamp(min=0)
        mass = left.sum(-1)
    return mass, left / mass.clamp(min=1e-300)[:, None]


def fastest_tree(
    acceptance: Sequence[float],
    nodes: int,
    draft_time: float,
    verify_time: Callable[[int], float],
    *,
    deepest: int | None = None,
) -> tuple[list[int], float, float]:
    """(parents, tokens a step, time a token) of the static tree of at most `nodes` nodes that is fastest.

    acceptance[b] is the measured probability that the b-th child of a node is the accepted one; nodes count the root.
    It minimises (depth draft_time + verify_time(m)) / T(m, depth) over nodes m and depth (Sequoia): a level is one
    forward of the drafter, whatever its width. No path is longer than `deepest`.

    Example:
        >>> from specdec_lab.theory import fastest_tree
        >>> fastest_tree([0.6, 0.2], 8, 0.1, lambda nodes: 1.0 + 0.1 * nodes)[0]
        [-1, 0, 0, 1]
    """
    levels = nodes - 1 if deepest is None else min(nodes - 1, deepest)
    worth, taken = _program(acceptance, nodes, levels)
    best = (verify_time(1), 1, 0)
    for depth in range(1, levels + 1):
        for m in range(depth + 1, nodes + 1):
            time = (depth * draft_time + verify_time(m)) / (1 + float(worth[depth][m - 1]))
            best = min(best, (time, m, depth))
    time, m, depth = best
    return _grown(taken, m - 1, depth), 1 + float(worth[depth][m - 1]), time


def _program(acceptance: Sequence[float], nodes: int, levels: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """(most accepted tokens by levels and nodes below the root, sizes of the eldest subtrees that reach them)."""
    if nodes < 1 or not acceptance or not all(0 <= a <= 1 for a in acceptance):
        raise ValueError(f"fastest_tree: nodes >= 1 and acceptance in [0, 1], got {nodes} and {list(acceptance)}")
    rates = torch.tensor(list(acceptance), dtype=torch.float64)
    sizes = torch.arange(nodes)
    rest = sizes[:, None] - sizes  # [m, y]: left of m nodes when the eldest subtree takes y
    # worth[l][b][m]: m nodes below one node, at most l levels, children b, b + 1, .. of it (an elder before a younger).
    nothing = torch.zeros(nodes, dtype=torch.float64)
    worth = [[nothing] * (len(rates) + 1)]
    taken: list[list[Tensor]] = [[]]
    for _ in range(levels):
        below = worth[-1][0]
        level: list[Tensor] = [nothing]
        choice: list[Tensor] = []
        for rate in rates.flip(0):
            eldest = torch.cat([nothing[:1], rate * (1 + below[:-1])])  # y = 0: no further child
            split = (eldest + level[0][rest.clamp(min=0)]).where((rest >= 0) & (sizes > 0), 0.0)
            best = split.max(1)
            level, choice = [best.values, *level], [best.indices, *choice]
        worth.append(level)
        taken.append(choice)
    return [level[0] for level in worth], taken


def _grown(taken: list[list[Tensor]], nodes: int, levels: int) -> list[int]:
    """Parents by generation, from how many nodes each child's subtree takes."""
    parents, generation = [-1], [(0, nodes, levels)]
    while generation:
        following = []
        for node, left, level in generation:
            for choice in taken[level]:
                took = int(choice[left])
                if took == 0:
                    break
                following.append((len(parents), took - 1, level - 1))
                parents.append(node)
                left -= took
        generation = following
    return parents
