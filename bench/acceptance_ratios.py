"""acceptance_ratios beside softmax, gather and minimum of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec_kernels import RatioResult, acceptance_ratios

from . import cases as case_tables
from .cases import Case
from .rows import ChainInput
from .suite import Contender, chain_inputs, distribution, first_requests, pytest_speed, rivals_for, same_check


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
    rivals = {
        rival.NAME: lambda x, rival=rival: rival.acceptance_ratios(x.draft_ids, x.target, x.draft, *distribution(x))
        for rival in rivals_for(case, "acceptance_ratios")
    }
    return same_check(ours, backends, rivals, check)


test_speed = pytest_speed("acceptance_ratios")
