"""acceptance_ratios beside softmax, gather and minimum of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec_kernels import RatioResult, acceptance_ratios

from . import cases as case_tables
from .cases import Case
from .rows import ChainInput
from .suite import Contender, chain_inputs, first_requests, law, pytest_speed, rivals_for


def cases(extent: str) -> list[Case]:
    """Cases of `quick`, `default` or `full`."""
    return case_tables.row_cases("acceptance_ratios", extent)


def inputs(case: Case) -> list[ChainInput]:
    """The batches of verify_chain."""
    return chain_inputs(case)


def ours(x: ChainInput, backend: str) -> RatioResult:
    """One call of the package."""
    sampling = x.filters.sampling(len(x.draft_ids), str(x.target.device))
    return acceptance_ratios(
        x.draft_ids, x.target, x.draft, sampling=sampling, draft_sampling=sampling, backend=backend
    )


def check(run: Callable[[ChainInput], tuple[torch.Tensor, ...]]) -> Callable[[ChainInput], None]:
    """Ratio and overlap of the reference."""

    def compare(x: ChainInput) -> None:
        part = first_requests(x)
        for name, got, want in zip(("ratio", "overlap"), run(part), ours(part, "reference"), strict=False):
            worst = float((got - want).abs().max())
            assert worst < 1e-4, f"{name} differs by {worst}"

    return compare


def contenders(case: Case, made: Sequence[ChainInput], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rivals."""
    field = []
    for backend in backends:
        run = lambda x, backend=backend: ours(x, backend)  # noqa: E731
        field.append(Contender(backend, True, run, check(run)))
    for rival in rivals_for(case, "acceptance_ratios"):
        run = lambda x, rival=rival: rival.acceptance_ratios(x.draft_ids, x.target, x.draft, *law(x))  # noqa: E731
        field.append(Contender(rival.NAME, False, run, check(run)))
    return field


test_speed = pytest_speed("acceptance_ratios")
