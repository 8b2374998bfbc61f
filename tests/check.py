"""What a test may assert: equal decisions, no worse than PyTorch, a distribution with its false-alarm rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FALSE_ALARM = 1e-6  # of every distribution test here; the suite runs a few hundred of them


def chi_square_p(statistic: float, freedom: int) -> float:
    """P(chi-square >= statistic) (regularised upper incomplete gamma)."""
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def law_p_value(counts: Tensor, law: Tensor, least: float = 5.0) -> float:
    """p-value of observed counts under a law; cells expecting fewer than `least` are pooled.

    An outcome of probability zero that was observed gives 0.
    """
    counts, law = counts.double(), law.double()
    if bool((counts[law <= 0] > 0).any()):
        return 0.0
    counts, law = counts[law > 0], law[law > 0]
    expected = law / law.sum() * counts.sum()
    small = expected < least
    if bool(small.any()):
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    if len(expected) < 2:
        return 1.0
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return chi_square_p(statistic, len(expected) - 1)


def assert_law(counts: Tensor, law: Tensor, what: str) -> None:
    """The counts could come from the law; fails by chance with probability FALSE_ALARM."""
    p = law_p_value(counts, law)
    assert p > FALSE_ALARM, f"{what}: p-value {p:.3g} below the false-alarm rate {FALSE_ALARM}"


def assert_biased(counts: Tensor, law: Tensor, what: str) -> None:
    """The twin of `assert_law`: an injected bias must be found, or the test above proves nothing."""
    p = law_p_value(counts, law)
    assert p < FALSE_ALARM, f"{what}: the injected bias was not found (p-value {p:.3g})"


def assert_no_worse(ours: Tensor, reference: Tensor, exact: Tensor, floor: float = 1e-6) -> None:
    """|exact - ours| <= 2 |exact - reference| + floor, elementwise maximum: tolerance earned, not chosen."""
    error = float((exact - ours.double()).abs().max()) if exact.numel() else 0.0
    allowed = 2 * (float((exact - reference.double()).abs().max()) if exact.numel() else 0.0) + floor
    assert error <= allowed, f"error {error:.3g} exceeds {allowed:.3g}"


def assert_same(ours: tuple[Tensor | None, ...], theirs: tuple[Tensor | None, ...], names: tuple[str, ...]) -> None:
    """Bit for bit the same results."""
    for name, a, b in zip(names, ours, theirs, strict=True):
        if a is None or b is None:
            assert a is None and b is None, name
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, f"{name}: {a.dtype} {a.shape} against {b.dtype} {b.shape}"
        same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
        assert bool(same.all()), f"{name} differs at {(~same).nonzero()[:5].tolist()}: {a[~same][:5]} {b[~same][:5]}"


def noise_floor(cells: int, draws: int) -> float:
    """Expected total variation between a law over `cells` equal cells and `draws` draws from it."""
    return 0.5 * math.sqrt(2 * (cells - 1) / (math.pi * draws))
