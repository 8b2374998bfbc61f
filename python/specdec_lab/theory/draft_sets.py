"""Several candidates at one node: acceptance of each rule, the ceiling of all rules, and the best static tree.

Rows p (target) and q (draft) are float64 ``[..., vocab]``; K candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .rejections import residuals


def set_acceptance(p: Tensor, ids: Tensor) -> Tensor:
    """Deterministic candidates: p(S), the optimum over all lossless rules; what ``match`` accepts."""
    return p.gather(-1, ids).sum(-1)


def with_replacement(p: Tensor, q: Tensor, count: int) -> Tensor:
    """Recursive rejection of K independent draws: 1 - prod_m TV(p^m, q)."""
    flat_p, flat_q = p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1])
    return (1 - residuals(flat_p, flat_q, count)[0]).reshape(p.shape[:-1])


def without_replacement(p: Tensor, q: Tensor, count: int) -> float:
    """Recursive rejection of K draws without replacement, by enumeration of their orders (one row)."""
    total = 0.0
    for order in itertools.permutations(range(len(p)), count):
        drawn, gone, rejected, scale, mass = 1.0, 0.0, 1.0, 0.0, 1.0
        for x in order:
            px, qx = float(p[x]), float(q[x])
            if qx <= 0 or gone >= 1:
                drawn = 0.0
                break
            drawn *= qx / (1 - gone)
            chance = 0.0 if mass <= 0 else max(0.0, (px / qx - scale) * (1 - gone) / mass)
            rejected *= 1 - min(1.0, chance)
            scale += mass / (1 - gone)
            mass = float((p - scale * q).clamp(min=0).sum())
            gone += qx
        total += drawn * (1 - rejected)
    return total


def k_sequential(p: Tensor, q: Tensor, count: int) -> tuple[float, float]:
    """(acceptance, g) of SpecTr's K-SEQ on one row: accept x with min(1, p / (g q)), g the smallest that is valid.

    beta(g) = sum min(q, p / g); g in [1, K] with 1 - (1 - beta)^K <= g beta; acceptance 1 - (1 - beta)^K.
    """

    def beta(g: float) -> float:
        return float(torch.minimum(q, p / g).sum())

    low, high = 1.0, float(count)
    for _ in range(100):
        middle = (low + high) / 2
        if 1 - (1 - beta(middle)) ** count <= middle * beta(middle):
            high = middle
        else:
            low = middle
    return 1 - (1 - beta(high)) ** count, high


def ceiling(p: Tensor, q: Tensor, count: int) -> Tensor:
    """Optimal transport: no rule accepts one of K independent draws more often than min_H p(H) + 1 - q(H)^K.

    The minimum is at a prefix of the ids sorted by q / p, falling.
    """
    order = (q / p.clamp(min=1e-300)).argsort(dim=-1, descending=True)
    kept_p = torch.nn.functional.pad(p.gather(-1, order).cumsum(-1), (1, 0))
    kept_q = torch.nn.functional.pad(q.gather(-1, order).cumsum(-1), (1, 0))
    return (kept_p + 1 - kept_q.clamp(max=1) ** count).amin(-1)


def set_ceiling(p: Tensor, sets: Mapping[tuple[int, ...], float]) -> float:
    """The same for any distribution of candidate sets, {ids: probability}: min_H p(H) + 1 - P(all in H), one row.

    By enumeration of every H: for small vocabularies.
    """
    vocab = len(p)
    best = 1.0
    for chosen in itertools.product((False, True), repeat=vocab):
        inside = sum(share for ids, share in sets.items() if all(chosen[x] for x in ids))
        best = min(best, float(p[torch.tensor(chosen)].sum()) + 1 - inside)
    return best


def greedy_multi_draft(p: Tensor, q: Tensor, count: int) -> Tensor:
    """The K - 1 likeliest ids of q and one draw from the rest: p(S0) + sum_{x not in S0} min(p, q')."""
    best = q.topk(count - 1, dim=-1).indices
    rest = q.scatter(-1, best, 0.0)
    rest = rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)
    return set_acceptance(p, best) + torch.minimum(p.scatter(-1, best, 0.0), rest).sum(-1)


def best_tree(acceptance: Sequence[float], nodes: int, depth: int | None = None) -> tuple[list[int], float]:
    """Static tree of `nodes` nodes, the root counted, that yields most tokens a step (Sequoia's dynamic program).

    Args:
        acceptance: acceptance[b] is the measured probability that the b-th child of a node is the accepted one.
        nodes: how many nodes the target can take.
        depth: longest path, the root not counted; None is no bound.

    Returns:
        (parents of the nodes in topological order, expected tokens a step: accepted nodes and the one drawn after).

    Example:
        >>> from specdec_lab.theory import best_tree
        >>> best_tree([0.6, 0.2, 0.1], 4, depth=2)
        ([-1, 0, 0, 1], 2.16)
    """
    levels = nodes - 1 if depth is None else min(depth, nodes - 1)
    worth, taken = _program(acceptance, nodes, levels)
    return _grown(taken, nodes - 1, levels), 1 + float(worth[levels][nodes - 1])


def fastest_tree(
    acceptance: Sequence[float],
    nodes: int,
    draft_time: float,
    verify_time: Callable[[int], float],
    *,
    deepest: int | None = None,
) -> tuple[list[int], float, float]:
    """(parents, tokens a step, time a token) of the static tree of at most `nodes` nodes that is fastest.

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
        raise ValueError(f"best_tree: nodes >= 1 and acceptance in [0, 1], got {nodes} and {list(acceptance)}")
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
