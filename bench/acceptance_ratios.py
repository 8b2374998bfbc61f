"""acceptance_ratios beside softmax, gather and minimum of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_kernels import RatioResult, acceptance_ratios

from .cases import Case, row_cases
from .rows import ChainInput
from .suite import Run, chain_inputs, first_requests, rivals_for

OP, QUICK = "acceptance_ratios", 2
CASES = row_cases(OP)
inputs = chain_inputs


def ours(case: Case, x: ChainInput, backend: str) -> RatioResult:
    """One call of the package."""
    return acceptance_ratios(
        x.draft_ids, x.target, x.draft, sampling=x.sampling, draft_sampling=x.sampling, backend=backend
    )


def check(case: Case, run: Run, x: ChainInput) -> None:
    """Ratio and overlap of the reference."""
    part = first_requests(x)
    for name, got, want in zip(("ratio", "overlap"), run(part), ours(case, part, "reference"), strict=False):
        worst = float((got - want).abs().max())
        assert worst < 1e-4, f"{name} differs by {worst}"


def rivals(case: Case, made: Sequence[ChainInput]) -> dict[str, Run]:
    """Those that have the op."""
    return {
        rival.NAME: lambda x, rival=rival: rival.acceptance_ratios(x.draft_ids, x.target, x.draft, x.sampling)
        for rival in rivals_for(case, OP)
    }
