"""sample beside softmax + multinomial and the Gumbel race of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_kernels import SampleResult, sample

from .cases import BOTH, Case, row_cases
from .rows import ChainInput, distribution
from .suite import Run, first_requests, rivals_for, row_inputs, sampling_for

OP, QUICK = "sample", 2
CASES = [
    *row_cases(OP),
    Case(OP, vocab=32000),
    Case(OP, vocab=151936, batch=64, dtype="bf16"),
    Case(OP, batch=1, filters=BOTH),
    *(Case(OP, filters=filters) for filters in ("top-k 50", "top-p .95", "min-p .05")),
    Case(OP, rows="flat", filters=BOTH),
]
inputs = row_inputs


def ours(case: Case, x: ChainInput, backend: str) -> SampleResult:
    """One call of the package."""
    return sample(x.target, sampling=x.sampling, rng=x.rng, purpose="draft", backend=backend)


def check(case: Case, run: Run, x: ChainInput) -> None:
    """The reference's token and statistics."""
    part = first_requests(x)
    got, want = run(part), ours(case, part, "reference")
    assert torch.equal(got.token_ids, want.token_ids), f"{got.token_ids} != {want.token_ids}"
    assert torch.equal(got.threshold, want.threshold), f"{got.threshold} != {want.threshold}"
    assert torch.allclose(got.logsumexp, want.logsumexp, rtol=1e-5, atol=1e-5)


def check_rival(case: Case, run: Run, x: ChainInput) -> None:
    """Every token has mass."""
    tokens = run(x).view(-1, 1).cpu()
    mass = distribution(x.target.cpu(), x.filters)[0].gather(1, tokens)
    assert bool((mass > 0).all()), f"a token without mass: {tokens.tolist()}"


def rivals(case: Case, made: Sequence[ChainInput]) -> dict[str, Run]:
    """Those that sample."""
    return {
        rival.NAME: lambda x, rival=rival: rival.sample(x.target, sampling_for(rival, x))
        for rival in rivals_for(case, OP)
    }
