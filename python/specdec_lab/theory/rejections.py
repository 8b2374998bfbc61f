"""How often speculative decoding rejects, and what over-acceptance costs (Yin, Chen, Huang, Wang 2024).

Their p is the draft and their q the target; here p is the target and q the draft. Theorem 2 says that no lossless
acceptance rejects less often than `rejections`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


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


def rejections(target: Markov, draft: Markov) -> float:
    """Theorem 1: E[rejections] = sum_n E_{prefix ~ p}[TV(p_n, q_n)]; also Theorem 2's lower bound."""
    return batch_rejections(target, draft, 1)


def rejection_speedup(target: Markov, draft: Markov) -> float:
    """T / E[rejections]: against plain decoding where drafts are free and each rejection costs one target forward."""
    expected = rejections(target, draft)
    return (len(target.steps) + 1) / expected if expected > 0 else math.inf


def batch_rejections(target: Markov, draft: Markov, drafts: float) -> float:
    """Theorem 3: E[rejections] of Algorithm 4 with M independent drafts, M = math.inf for its limit.

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


def bernoulli_improvement(u: float, v: float, drafts: int) -> float:
    """TV - Pi_M at a fresh position for target Ber(v), draft Ber(u): ``|u - v| (1 - w^(M-1))``.

    w is the draft's probability of the symbol that it drafts too often.
    """
    w = u if u >= v else 1 - u
    return abs(u - v) * (1 - w ** (drafts - 1))


def uniform_improvement(ratio: float, drafts: int) -> float:
    """The same for a uniform draft over r times as many ids as the uniform target: (1 - 1/r) - (1 - 1/r)^M."""
    miss = 1 - 1 / ratio
    return miss - miss**drafts


def output_distribution(q: Tensor, accept: Tensor, residual: Tensor) -> Tensor:
    """Distribution of the emitted token where draft x ~ q is accepted with b(x), else drawn from a residual.

    b(x) q(x) + R residual(x), R = sum (1 - b) q. With b = min(1, p / q) and residual norm((p - q)+) it is p.
    """
    rejected = ((1 - accept) * q).sum(-1, keepdim=True)
    return accept * q + rejected * residual


class Lenient(NamedTuple):
    """Lenient acceptance (Leviathan et al.).

    Attributes:
        accepted: P(accept).
        distribution: of the emitted token; nowhere above p / lenience.
    """

    accepted: Tensor
    distribution: Tensor


def lenient(p: Tensor, q: Tensor, lenience: float) -> Lenient:
    """B = min(1, p / (l q)), residual norm((p - l q)+), 0 < l <= 1: P(accept) = sum min(q, p / l). 1 is lossless."""
    taken = torch.minimum(q, p / lenience)
    left = (p - lenience * q).clamp(min=0)
    accepted = taken.sum(-1)
    rest = left / left.sum(-1, keepdim=True).clamp(min=1e-300)
    return Lenient(accepted, taken + (1 - accepted)[..., None] * rest)


class OverAcceptance(NamedTuple):
    """One point of the front P(reject) + bias = TV(p, q).

    Attributes:
        rejected: P(reject).
        bias: total variation of the output where the residual is norm((p - q)+), Decoding-OPT; the least possible.
        bias_target: the same where a rejected position is drawn from p, Decoding-UNO.
    """

    rejected: Tensor
    bias: Tensor
    bias_target: Tensor


def over_acceptance(p: Tensor, q: Tensor, epsilon: float) -> OverAcceptance:
    """With b = min(1, (p + epsilon) / q): P(reject) = sum (q - p - eps)+, bias = sum min((q - p)+, eps) (Theorem 5).

    The kernels also refuse ids that the target excludes: pass the draft's distribution and epsilon as they are, and
    count its mass where p = 0 as rejected and not as bias.
    """
    surplus = q - p
    rejected = (surplus - epsilon).clamp(min=0).sum(-1)
    bias = surplus.clamp(min=0).clamp(max=epsilon).sum(-1)
    accepted = torch.minimum(q, p + epsilon)
    bias_target = (accepted - (1 - rejected[..., None]) * p).abs().sum(-1) / 2
    return OverAcceptance(rejected, bias, bias_target)


def loss(p: Tensor, q: Tensor, accept: Tensor) -> Tensor:
    """Theorem 4: least total variation to p of all algorithms that accept draft x with b(x): sum (b q - p)+."""
    return (accept * q - p).clamp(min=0).sum(-1)
