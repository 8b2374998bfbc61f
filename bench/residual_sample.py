"""residual_sample beside the materialised residual and multinomial of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_kernels import ResidualSample, residual_sample

from . import cases as case_tables
from .cases import Case
from .residual_probs import inputs as residual_inputs
from .rows import ChainInput
from .rows import distribution as exact_distribution
from .suite import Contender, distribution, first_requests, pytest_speed, rivals_for


def cases(extent: str) -> list[Case]:
    """Cases of `quick`, `default` or `full`."""
    return case_tables.row_cases("residual_sample", extent)


def inputs(case: Case) -> list[ChainInput]:
    """One pair of rows a request."""
    return residual_inputs(case)


def ours(x: ChainInput, backend: str) -> ResidualSample:
    """One call of the package."""
    sampling = x.filters.sampling(len(x.target), str(x.target.device))
    return residual_sample(x.target, x.draft, sampling=sampling, draft_sampling=sampling, rng=x.rng, backend=backend)


def check_ours(backend: str) -> Callable[[ChainInput], None]:
    """The reference's token and mass."""

    def check(x: ChainInput) -> None:
        part = first_requests(x)
        got, want = ours(part, backend), ours(part, "reference")
        assert torch.equal(got.token_ids, want.token_ids), f"{backend}: {got.token_ids} != {want.token_ids}"
        assert torch.allclose(got.mass, want.mass, rtol=1e-3, atol=1e-5), f"mass {got.mass} != {want.mass}"

    return check


def check_drawn(x: ChainInput, tokens: Tensor) -> None:
    """Every token has mass."""
    weight = exact_distribution(x.target.cpu(), x.filters)[0] - exact_distribution(x.draft.cpu(), x.filters)[0]
    mass = weight.gather(1, tokens.view(-1, 1).cpu())
    assert bool((mass > -1e-9).all()), f"a token without mass: {tokens.tolist()}"


def contenders(case: Case, made: Sequence[ChainInput], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rivals."""
    field = [Contender(b, True, lambda x, b=b: ours(x, b), check_ours(b)) for b in backends]
    for rival in rivals_for(case, "residual_sample"):
        run = lambda x, rival=rival: rival.residual_sample(x.target, x.draft, *distribution(x))  # noqa: E731
        field.append(Contender(rival.NAME, False, run, lambda x, run=run: check_drawn(x, run(x))))
    return field


test_speed = pytest_speed("residual_sample")
