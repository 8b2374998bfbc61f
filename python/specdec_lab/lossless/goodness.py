"""Goodness of fit: chi-square and G tests, total variation beside its noise, and the power of a test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 5.0  # cells that expect fewer are pooled


class Fit(NamedTuple):
    """Counts held against a distribution.

    Attributes:
        draws: how many.
        cells: after pooling.
        chi_square: p-value of Pearson's test.
        g: p-value of the G-test, 2 sum O ln(O / E).
        variation: total variation between the frequencies and the distribution.
        expected_variation: what chance alone gives, sum E|f - p| / 2, see `mean_deviation`.
        deviation: sqrt(mean (f - p)^2) over the ids.
        expected_deviation: its prediction sqrt(mean p (1 - p) / N).
    """

    draws: int
    cells: int
    chi_square: float
    g: float
    variation: float
    expected_variation: float
    deviation: float
    expected_deviation: float


def chi_square_tail(statistic: float | Tensor, freedom: float | Tensor) -> Tensor:
    """P(chi-square >= statistic): the regularised upper incomplete gamma function."""
    half, x = (torch.as_tensor(value, dtype=torch.float64) / 2 for value in (freedom, statistic))
    tail: Tensor = torch.special.gammaincc(half, x)
    return tail


def normal_tail(z: float) -> float:
    """P(|Z| >= |z|)."""
    return math.erfc(abs(z) / math.sqrt(2))


def pooled(values: Tensor, expected: Tensor) -> Tensor:
    """Values with the cells that expect fewer than `LEAST` made one, in the last place.

    Where all of them together expect fewer, the rarest of the others joins: chi-square has no such tail for one draw
    of an id that is expected 0.01 times.
    """
    small = expected < LEAST
    if bool(small.any()) and float(expected[small].sum()) < LEAST:
        small[expected.masked_fill(small, math.inf).argmin()] = True
    return torch.cat([values[~small], values[small].sum()[None]]) if bool(small.any()) else values


def fit(counts: Tensor, distribution: Tensor) -> Fit:
    """Test counts against a distribution, normalised or not; an observed outcome of probability 0 has p-value 0.

    Example:
        >>> import torch
        >>> from specdec_lab.lossless.goodness import fit
        >>> round(fit(torch.tensor([60, 40]), torch.tensor([0.5, 0.5])).chi_square, 4)
        0.0455
    """
    counts, distribution = counts.double().flatten(), distribution.double().flatten()
    distribution = distribution / distribution.sum()
    draws = counts.sum()
    noise = distribution * (1 - distribution) / draws
    difference = counts / draws - distribution
    impossible = bool((counts[distribution <= 0] > 0).any())
    possible = distribution > 0
    expected = distribution[possible] * draws
    observed, expected = pooled(counts[possible], expected), pooled(expected, expected)
    freedom = len(expected) - 1
    chi = float(((observed - expected) ** 2 / expected).sum())
    g = float(2 * torch.special.xlogy(observed, observed / expected).sum())
    tails = [1.0 if freedom < 1 else float(chi_square_tail(max(x, 0.0), freedom)) for x in (chi, g)]
    chi_p, g_p = (0.0, 0.0) if impossible else tails
    return Fit(
        int(draws), len(expected), chi_p, g_p, float(difference.abs().sum() / 2),
        float(mean_deviation(distribution, float(draws)).sum() / 2), float((difference**2).mean().sqrt()),
        float(noise.mean().sqrt()),
    )  # fmt: skip


def mean_deviation(p: Tensor, draws: float) -> Tensor:
    """E|X / N - p| of binomial X, exactly: 2 (m + 1) C(N, m + 1) p^(m + 1) (1 - p)^(N - m) / N, m = floor(N p).

    About sqrt(2 p (1 - p) / (pi N)) where N p is large (De Moivre).
    """
    inside = (p > 0) & (p < 1)
    p = torch.where(inside, p, 0.5)
    m, n = (draws * p).floor(), torch.full_like(p, draws)
    log_choose = torch.lgamma(n + 1) - torch.lgamma(m + 2) - torch.lgamma(n - m)
    log_mean = (m + 1).log() + log_choose + (m + 1) * p.log() + (n - m) * torch.log1p(-p)
    return torch.where(inside, 2 * log_mean.exp() / draws, 0.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for a family (Holm 1979): the family-wise error of `adjusted <= alpha` is at most alpha.

    Example:
        >>> from specdec_lab.lossless.goodness import holm
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def power(effect: float, freedom: int, alpha: float) -> float:
    """Probability that a chi-square test of level alpha finds a distribution whose noncentrality is `effect`.

    The noncentral tail is sum_j Poisson(j; effect / 2) P(chi-square of freedom + 2 j >= critical).
    """
    half = effect / 2
    spread = 12 * math.sqrt(half + 1) + 20
    j = torch.arange(max(0, math.floor(half - spread)), math.ceil(half + spread), dtype=torch.float64)
    weight = (torch.special.xlogy(j, torch.tensor(half)) - half - torch.lgamma(j + 1)).exp()
    return float((weight * chi_square_tail(torch.full_like(j, critical(freedom, alpha)), freedom + 2 * j)).sum())


def critical(freedom: int, alpha: float) -> float:
    """The statistic whose tail is alpha."""
    return _bisect(lambda x: float(chi_square_tail(x, freedom)) < alpha, freedom + 10.0)


def least_effect(freedom: int, alpha: float, wanted: float = 0.99) -> float:
    """Smallest noncentrality that a chi-square test of level alpha finds with probability `wanted`."""
    return _bisect(lambda effect: power(effect, freedom, alpha) >= wanted, 10.0 + freedom)


def least_bias(distribution: Tensor, towards: Tensor, draws: int, alpha: float) -> float:
    """Smallest total variation found with probability 0.99, for biases that mix in another distribution.

    The broken sampler (1 - e) p + e q has noncentrality N e^2 sum (q - p)^2 / p and total variation e TV(p, q); that is
    how a sampler errs that accepts too much. 0 where the distributions are equal.
    """
    distribution, towards = distribution.double() / distribution.sum(), towards.double() / towards.sum()
    expected = distribution * draws
    p, q = pooled(distribution, expected), pooled(towards, expected)
    effect = float(((q - p) ** 2 / p.clamp(min=1e-300)).sum()) * draws
    variation = float((distribution - towards).abs().sum() / 2)
    if effect <= 0 or len(p) < 2:
        return 0.0
    return min(1.0, math.sqrt(least_effect(len(p) - 1, alpha) / effect)) * variation


def _bisect(is_enough: object, high: float) -> float:
    """Smallest x >= 0 with is_enough(x), which is monotone."""
    assert callable(is_enough)
    while not is_enough(high):
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
