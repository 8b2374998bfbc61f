"""residual_probs beside softmax, subtract, clamp, normalise of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec_kernels import ResidualProbs, residual_probs

from . import cases as case_tables
from .cases import Case
from .rows import ChainInput
from .suite import Contender, chain_inputs, distribution, first_requests, pytest_speed, rivals_for, same_check


def cases(extent: str) -> list[Case]:
    """Cases of `quick`, `default` or `full`."""
    return case_tables.row_cases("residual_probs", extent)


def inputs(case: Case) -> list[ChainInput]:
    """One pair of rows a request."""
    made = chain_inputs(Case(case.op, case.vocab, case.batch, 1, case.dtype, case.filters, rows=case.rows))
    return [x._replace(target=x.target[:, 0].contiguous(), draft=x.draft[:, 0].contiguous()) for x in made]


def ours(x: ChainInput, backend: str) -> ResidualProbs:
    """One call of the package."""
    sampling = x.filters.sampling(len(x.target), str(x.target.device))
    return residual_probs(x.target, x.draft, sampling=sampling, draft_sampling=sampling, backend=backend)


def check(run: Callable[[ChainInput], tuple[torch.Tensor, ...]]) -> Callable[[ChainInput], None]:
    """Probabilities and mass of the reference."""

    def compare(x: ChainInput) -> None:
        part = first_requests(x)
        want = ours(part, "reference")
        got = run(part)
        worst = float((got[0] * got[1][:, None] - want.probs * want.mass[:, None]).abs().max())
        assert worst < 1e-5, f"the residual differs by {worst}"
        assert torch.allclose(got[1], want.mass, rtol=1e-3, atol=1e-5), f"mass {got[1]} != {want.mass}"

    return compare


def contenders(case: Case, made: Sequence[ChainInput], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rivals."""
    rivals = {
        rival.NAME: lambda x, rival=rival: rival.residual_probs(x.target, x.draft, *distribution(x))
        for rival in rivals_for(case, "residual_probs")
    }
    return same_check(ours, backends, rivals, check)


test_speed = pytest_speed("residual_probs")
