"""residual_sample beside the materialised residual and multinomial of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_kernels import ResidualSample, residual_sample

from .cases import Case, row_cases
from .rows import ChainInput, distribution
from .suite import Run, first_requests, rivals_for, row_inputs

OP, QUICK = "residual_sample", 2
CASES = row_cases(OP)
inputs = row_inputs


def ours(case: Case, x: ChainInput, backend: str) -> ResidualSample:
    """One call of the package."""
    return residual_sample(
        x.target, x.draft, sampling=x.sampling, draft_sampling=x.sampling, rng=x.rng, backend=backend
    )


def check(case: Case, run: Run, x: ChainInput) -> None:
    """The reference's token and mass."""
    part = first_requests(x)
    got, want = run(part), ours(case, part, "reference")
    assert torch.equal(got.token_ids, want.token_ids), f"{got.token_ids} != {want.token_ids}"
    assert torch.allclose(got.mass, want.mass, rtol=1e-3, atol=1e-5), f"mass {got.mass} != {want.mass}"


def check_rival(case: Case, run: Run, x: ChainInput) -> None:
    """Every token has mass."""
    tokens = run(x).view(-1, 1).cpu()
    weight = distribution(x.target.cpu(), x.filters)[0] - distribution(x.draft.cpu(), x.filters)[0]
    assert bool((weight.gather(1, tokens) > -1e-9).all()), f"a token without mass: {tokens.tolist()}"


def rivals(case: Case, made: Sequence[ChainInput]) -> dict[str, Run]:
    """Those that have the op."""
    return {
        rival.NAME: lambda x, rival=rival: rival.residual_sample(x.target, x.draft, x.sampling)
        for rival in rivals_for(case, OP)
    }
