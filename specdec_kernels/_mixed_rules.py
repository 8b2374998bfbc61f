"""A rule for each request of a batch: one call of the op for each rule, in which the other requests are not active."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._check import Checker, fail
from ._codes import Status
from ._op import Op, Tensors
from ._types import Sampling


class MixedRules(NamedTuple):
    """Rules of a batch whose requests do not all have the same one; `verify_chain` and `verify_tree` take it as `rule`.

    Each rule is launched once, for its own requests; a request's rows are read by its own rule alone. Options of a
    rule are read by it alone: `over_acceptance`, `typical_epsilon` and `typical_delta` may be one for each request.

    Attributes:
        rules: names of rules, each once.
        choice: int32 ``[batch]``: the place of each request's rule in `rules`. Nothing is emitted for a request with
            another number, and bit 64 of its `status` is set.

    Example:
        >>> import torch
        >>> from specdec_kernels import MixedRules
        >>> MixedRules(("greedy", "match"), torch.tensor([1, 0, 1], dtype=torch.int32)).rules
        ('greedy', 'match')
    """

    rules: Sequence[Any]
    choice: Tensor


def rule_names(check: Checker, rule: Any, codes: dict[str, int], batch: int) -> tuple[str, ...]:
    """The rules of a call; more than one only of a `MixedRules`."""
    if not isinstance(rule, MixedRules):
        check.choice("rule", rule, codes)
        return (rule,)
    if not isinstance(rule.rules, (tuple, list)) or not rule.rules:
        fail(check.op, "rule.rules", "a tuple of names of rules", repr(rule.rules))
    for name in rule.rules:
        check.choice("rule.rules", name, codes)
    if len(set(rule.rules)) < len(rule.rules):
        fail(check.op, "rule.rules", "names of rules, each once", repr(rule.rules))
    check.vector("rule.choice", rule.choice, (torch.int32,), batch)
    return tuple(rule.rules)


def calls_of(rule: Any, sampling: Sampling) -> list[tuple[Any, Sampling]]:
    """Rule and sampling parameters of each call of the op: one call, or one for each rule of a `MixedRules`."""
    if not isinstance(rule, MixedRules):
        return [(rule, sampling)]
    calls = []
    for i, name in enumerate(rule.rules):
        active = rule.choice == i
        if sampling.active is not None:
            active &= sampling.active
        calls.append((name, sampling._replace(active=active)))
    return calls


def with_knobs(sampling: Sampling, *knobs: Tensor | None) -> tuple[Any, ...]:
    """(sampling parameters, numbers of the rule): a NaN or negative number becomes 0, beside a bad temperature."""
    good = []
    for knob in knobs:
        if knob is not None:
            is_good = knob >= 0
            temperature = torch.ones_like(knob) if sampling.temperature is None else sampling.temperature
            sampling = sampling._replace(temperature=torch.where(is_good, temperature, torch.nan))
            knob = torch.where(is_good, knob, 0.0)
        good.append(knob)
    return sampling, *good


def merged(
    op: Op, rule: MixedRules, sampling: Sampling, args: tuple[Any, ...], done: list[Tensors], out: Tensors | None
) -> Tensors:
    """Results of `calls_of` as one; `args` are those of any of them."""
    has_rule = (rule.choice >= 0) & (rule.choice < len(rule.rules))
    if sampling.active is not None:
        has_rule |= ~sampling.active
    results = [_merged(parts) for parts in zip(*done, strict=True)]
    results[op.results.index("status")].masked_fill_(~has_rule, int(Status.BAD_SAMPLING))
    delivered: Tensors = op.deliver(args, tuple(results), out)
    return delivered


def _merged(parts: Tensors) -> Tensor:
    """Where a request is not active, ids are -1 and all else is 0; log-probabilities are never positive."""
    stacked = torch.stack(parts)
    return stacked.amin(0) if stacked.is_floating_point() else stacked.amax(0)
