"""Assertions: equal decisions, no worse than PyTorch, a distribution with its false-alarm rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from specdec_kernels import _backends, use_backend

FEWEST = 5.0  # outcomes that expect fewer are counted together: chi-square is an approximation
FALSE_ALARM = 1e-6  # of every distribution test here; the suite runs a few hundred of them


T = TypeVar("T")


def of_the_reference(ours: T, again: Callable[[], T]) -> T:
    """The reference's result of a call; a test that runs on the reference has it already."""
    if _backends._choices[-1].backend == "reference":
        return ours
    with use_backend("reference"):
        return again()


def distribution_p_value(counts: Tensor, distribution: Tensor) -> float:
    """p-value of observed counts under a distribution; 0 where an outcome of probability 0 was observed."""
    counts, p = counts.double().flatten(), distribution.double().flatten() / distribution.double().sum()
    if bool((counts[p <= 0] > 0).any()):
        return 0.0
    counts, expected = counts[p > 0], p[p > 0] * counts.sum()
    rare = expected < FEWEST
    if bool(rare.any()):
        counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    if len(expected) < 2:
        return 1.0
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), chi_square / 2))


def assert_distribution(counts: Tensor, distribution: Tensor, what: str) -> None:
    """The counts could come from the distribution; fails by chance with probability FALSE_ALARM."""
    p = distribution_p_value(counts, distribution)
    assert p > FALSE_ALARM, f"{what}: p-value {p:.3g} below the false-alarm rate {FALSE_ALARM}"


def assert_biased(counts: Tensor, distribution: Tensor, what: str) -> None:
    """The twin of `assert_distribution`: an injected bias must be found, or the test above proves nothing."""
    p = distribution_p_value(counts, distribution)
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
