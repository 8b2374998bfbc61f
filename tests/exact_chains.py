"""Exact distributions of chain verification in float64, written from the mathematics, not from the package's code.

`chain_distribution` gives, for one draft and its probability rows, the probability of every outcome (accepted prefix
and next token). Summed over drafts it must equal the target's own distribution for the lossless rules: that is the
proof by enumeration.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_lab.lossless.exact import processed

__all__ = ["chain_distribution", "joint_error", "positive", "processed"]


def positive(x: Tensor) -> Tensor:
    """(x)+ normalised."""
    x = x.clamp(min=0)
    return x / x.sum()


def chain_distribution(
    draft: Sequence[int], p: Tensor, q: Tensor, rule: str, over: float = 0.0, **knobs: float
) -> dict[tuple[int, ...], float]:
    """Distribution of the emitted tokens; target rows p [draft + 1, vocab], draft rows q [draft, vocab]."""
    out: dict[tuple[int, ...], float] = {}

    def emit(prefix: tuple[int, ...], weight: float, distribution: Tensor) -> None:
        for token, share in enumerate(distribution.tolist()):
            if weight * share > 0:
                out[(*prefix, token)] = out.get((*prefix, token), 0.0) + weight * share

    if rule == "block":
        return _block_distribution(draft, p, q)
    alive = 1.0
    for i, x in enumerate(draft):
        px, qx = float(p[i, x]), float(q[i, x])
        if rule == "ratio":
            accept = min(1.0, (px + over) / qx) if px > 0 and qx > 0 else 0.0
            rest = positive(p[i] - q[i]) if float((p[i] - q[i]).clamp(min=0).sum()) > 0 else p[i]
        elif rule == "match":
            accept = px
            rest = p[i].clone()
            rest[x] = 0
            rest = rest / rest.sum() if float(rest.sum()) > 0 else rest
        elif rule == "typical":
            entropy = -float(torch.special.xlogy(p[i], p[i]).sum())
            edge = min(knobs.get("epsilon", 0.09), knobs.get("delta", 0.3) * float(torch.exp(torch.tensor(-entropy))))
            accept, rest = float(px > 0 and px > edge), p[i]
        else:
            raise ValueError(rule)
        emit(tuple(draft[:i]), alive * (1 - accept), rest)
        alive *= accept
    emit(tuple(draft), alive, p[len(draft)])
    return out


def _block_distribution(draft: Sequence[int], p: Tensor, q: Tensor) -> dict[tuple[int, ...], float]:
    """Block verification (Sun et al. 2024): tau = max{i: eta_i < h_i} over independent coins."""
    k = len(draft)
    w = [1.0]
    for i, x in enumerate(draft):
        w.append(min(1.0, w[-1] * float(p[i, x]) / float(q[i, x])))
    out: dict[tuple[int, ...], float] = {}
    above = 1.0  # probability that no coin beyond i accepted
    for i in range(k, -1, -1):
        if i == k:
            h, distribution = w[k] if k else 1.0, p[k]
        else:
            rest = (w[i] * p[i] - q[i]).clamp(min=0)
            mass = float(rest.sum())
            h = mass / (mass + 1 - w[i]) if mass + 1 - w[i] > 0 else 1.0
            distribution = rest / mass if mass > 0 else p[i]
        h = 1.0 if i == 0 else h
        for token, share in enumerate(distribution.tolist()):
            if above * h * share > 0:
                key = (*draft[:i], token)
                out[key] = out.get(key, 0.0) + above * h * share
        above *= 1 - h
    return out


def joint_error(
    rule: str, p: dict[tuple[int, ...], Tensor], q: dict[tuple[int, ...], Tensor], vocab: int, draft: int
) -> float:
    """Largest error of the distribution of the first draft + 1 tokens, over full-history tables p and q."""
    joint: dict[tuple[int, ...], float] = {}
    for ids in itertools.product(range(vocab), repeat=draft):
        weight = 1.0
        for i in range(draft):
            weight *= float(q[ids[:i]][ids[i]])
        if weight == 0:
            continue
        rows_p = torch.stack([p[ids[:i]] for i in range(draft + 1)])
        rows_q = torch.stack([q[ids[:i]] for i in range(draft)]) if draft else torch.zeros(0, vocab)
        for tokens, share in chain_distribution(ids, rows_p, rows_q, rule).items():
            for tail in itertools.product(range(vocab), repeat=draft + 1 - len(tokens)):
                whole, mass = tokens + tail, weight * share
                for j in range(len(tokens), draft + 1):
                    mass *= float(p[whole[:j]][whole[j]])
                joint[whole] = joint.get(whole, 0.0) + mass
    worst = 0.0
    for whole in itertools.product(range(vocab), repeat=draft + 1):
        exact = 1.0
        for j in range(draft + 1):
            exact *= float(p[whole[:j]][whole[j]])
        worst = max(worst, abs(exact - joint.get(whole, 0.0)))
    return worst
