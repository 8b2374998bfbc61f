"""Shared by `bench/<op>.py`: contenders of a case, the check before the clock, the bridge to pytest-benchmark."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels

from .cases import FILTERS, Case
from .machine import ROOT
from .rivals import rivals
from .rows import DTYPES, ChainInput, chains

__all__ = ["ROOT"]
OPS = (
    "verify_chain",
    "sample",
    "acceptance_ratios",
    "residual_probs",
    "residual_sample",
    "compact_cache",
    "rollback",
    "gather_nodes",
    "select_state",
    "verify_tree",
    "tree_layout",
    "tree_mask",
    "select_tree",
    "tree_from_sequences",
    "tree_attention",
    "tree_cache",
    "linear",
)
CHECKED_REQUESTS = 4  # a row is checked against the (slow) reference on so many requests


class Contender(NamedTuple):
    """Somebody who runs in a case."""

    name: str
    is_ours: bool
    run: Callable[[Any], Any]  # takes one input of the case
    check: Callable[[Any], None]  # raises AssertionError where it differs from the reference


def module(op: str) -> ModuleType:
    """bench/<op>.py."""
    return importlib.import_module(f"bench.{op}")


def backends(wanted: Sequence[str] = ()) -> list[str]:
    """Ours that are timed here: the wanted ones, else every compiled one that runs."""
    reasons = specdec_kernels.available_backends()
    for name in wanted:
        if reasons.get(name, "no such backend") is not None:
            raise SystemExit(f"bench: backend {name} cannot run: {reasons.get(name, 'no such backend')}")
    device = torch.cuda.is_available()
    natural = ("cuda", "triton") if device else ("cpu",)
    return list(wanted) or [b for b in natural if reasons[b] is None] or ["reference"]


def chain_inputs(case: Case) -> list[ChainInput]:
    """Enough batches that a round trip leaves no row in a private cache, acceptance right as a whole."""
    count = {1: 8, 4: 4, 16: 2}.get(case.batch, 1)
    made = chains(
        count, case.batch, case.draft, case.vocab,
        dtype=DTYPES[case.dtype], filters=FILTERS[case.filters], shape=case.rows,
    )  # fmt: skip
    return [x.to("cuda") for x in made] if torch.cuda.is_available() else made


def distribution(x: ChainInput) -> tuple[Tensor | None, ...]:
    """(temperature, top_k, top_p, min_p) as tensors [batch], made before the clock."""
    return tuple(x.filters.sampling(len(x.draft_ids), str(x.target.device)))


def first_requests(x: ChainInput, count: int = CHECKED_REQUESTS) -> ChainInput:
    """The first requests of a batch, as views."""
    parts = [p[:count] if isinstance(p, Tensor) else p for p in x]
    parts[6] = specdec_kernels.RngKey(*(n if n is None else n[:count] for n in x.rng))
    return ChainInput(*parts)  # type: ignore[arg-type]


def rivals_for(case: Case, function: str) -> list[ModuleType]:
    """Rivals that have the op, run here and take the case."""
    return [r for r in rivals() if hasattr(r, function) and r.available() is None and r.supports(case) is None]


def same_check(
    ours: Callable[..., Any],
    backends: Sequence[str],
    rivals: Mapping[str, Callable[[Any], Any]],
    check: Callable[[Callable[[Any], Any]], Callable[[Any], None]],
) -> list[Contender]:
    """Ours on each backend, then the rivals, all held to one check."""
    runs: list[tuple[str, bool, Callable[[Any], Any]]] = [(b, True, partial(ours, backend=b)) for b in backends]
    runs += [(name, False, run) for name, run in rivals.items()]
    return [Contender(name, is_ours, run, check(run)) for name, is_ours, run in runs]


def pytest_speed(op: str) -> Callable[..., None]:
    """A parametrised test for pytest-benchmark: `pytest bench/<op>.py --benchmark-group-by=param:case`."""
    import pytest

    cases = module(op).cases("quick")

    @pytest.mark.parametrize("case", cases, ids=[c.id for c in cases])
    def test_speed(benchmark: Any, case: Case) -> None:
        """Our default backend in one case; `python -m bench` is the run that compares."""
        inputs = module(op).inputs(case)
        ours = next(c for c in module(op).contenders(case, inputs, backends()[:1]) if c.is_ours)
        ours.check(inputs[0])
        turn = iter(range(10**9))
        benchmark.extra_info.update(op=op, case=case.name, contender=ours.name)
        benchmark(lambda: ours.run(inputs[next(turn) % len(inputs)]))

    return test_speed
