"""sample beside softmax + multinomial and the Gumbel race of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import SampleResult, sample

from . import cases as case_tables
from .cases import Case
from .rows import ChainInput
from .rows import distribution as exact_distribution
from .suite import Contender, chain_inputs, distribution, first_requests, pytest_speed, rivals_for


def cases(extent: str) -> list[Case]:
    """Cases of `quick`, `default` or `full`."""
    return case_tables.row_cases("sample", extent)


def inputs(case: Case) -> list[ChainInput]:
    """Batches whose first target row is sampled."""
    made = chain_inputs(Case(case.op, case.vocab, case.batch, 1, case.dtype, case.filters, rows=case.rows))
    return [x._replace(target=x.target[:, 0].contiguous()) for x in made]


def ours(x: ChainInput, backend: str) -> SampleResult:
    """One call of the package."""
    sampling = x.filters.sampling(len(x.target), str(x.target.device))
    return sample(x.target, sampling=sampling, rng=x.rng, purpose="draft", backend=backend)


def check_ours(backend: str) -> Callable[[ChainInput], None]:
    """The reference's token and statistics."""

    def check(x: ChainInput) -> None:
        part = first_requests(x)
        got, want = ours(part, backend), ours(part, "reference")
        assert torch.equal(got.token_ids, want.token_ids), f"{backend}: {got.token_ids} != {want.token_ids}"
        assert torch.equal(got.threshold, want.threshold), f"{backend}: {got.threshold} != {want.threshold}"
        assert torch.allclose(got.logsumexp, want.logsumexp, rtol=1e-5, atol=1e-5)

    return check


def check_drawn(x: ChainInput, tokens: Tensor) -> None:
    """Every token has mass."""
    p = exact_distribution(x.target.cpu(), x.filters)[0]
    mass = p.gather(1, tokens.view(-1, 1).cpu())
    assert bool((mass > 0).all()), f"a token without mass: {tokens.tolist()}"


def contenders(case: Case, made: Sequence[ChainInput], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rivals."""
    field = [Contender(b, True, lambda x, b=b: ours(x, b), check_ours(b)) for b in backends]
    distributions = {id(x): distribution(x) for x in made}
    for rival in rivals_for(case, "sample"):

        def run(x: ChainInput, rival: Any = rival) -> Tensor:
            parameters = list(distributions[id(x)])
            if rival.NAME.startswith("topk"):
                parameters[1] = x.filters.top_k  # torch.topk wants a host number
            return rival.sample(x.target, *parameters)

        field.append(Contender(rival.NAME, False, run, lambda x, run=run: check_drawn(x, run(x))))
    return field


test_speed = pytest_speed("sample")
