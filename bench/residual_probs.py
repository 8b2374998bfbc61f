"""residual_probs beside softmax, subtract, clamp, normalise of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_kernels import ResidualProbs, residual_probs

from .cases import Case, row_cases
from .rows import ChainInput
from .suite import Run, first_requests, rivals_for, row_inputs

OP, QUICK = "residual_probs", 2
CASES = row_cases(OP)
inputs = row_inputs


def ours(case: Case, x: ChainInput, backend: str) -> ResidualProbs:
    """One call of the package."""
    return residual_probs(x.target, x.draft, sampling=x.sampling, draft_sampling=x.sampling, backend=backend)


def check(case: Case, run: Run, x: ChainInput) -> None:
    """Probabilities and mass of the reference."""
    part = first_requests(x)
    want = ours(case, part, "reference")
    probs, mass = run(part)[:2]
    worst = float((probs * mass[:, None] - want.probs * want.mass[:, None]).abs().max())
    assert worst < 1e-5, f"the residual differs by {worst}"
    assert torch.allclose(mass, want.mass, rtol=1e-3, atol=1e-5), f"mass {mass} != {want.mass}"


def rivals(case: Case, made: Sequence[ChainInput]) -> dict[str, Run]:
    """Those that have the op."""
    return {
        rival.NAME: lambda x, rival=rival: rival.residual_probs(x.target, x.draft, x.sampling)
        for rival in rivals_for(case, OP)
    }
