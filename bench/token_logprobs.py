"""token_logprobs, a token and the 20 most likely ids of each row, beside log_softmax, topk, gather and a count."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_kernels import TokenLogprobs, token_logprobs

from .cases import Case
from .rows import ChainInput
from .suite import Run, first_requests, row_inputs

OP, QUICK, TOP = "token_logprobs", 2, 20
CASES = [
    Case(OP),
    Case(OP, dtype="bf16"),
    Case(OP, batch=1),
    Case(OP, vocab=151936, batch=64, dtype="bf16"),
    Case(OP, rows="flat"),
]
inputs = row_inputs


def ours(case: Case, x: ChainInput, backend: str) -> TokenLogprobs:
    """One call of the package."""
    return token_logprobs(x.target, x.draft_ids[:, 0].contiguous(), top=TOP, backend=backend)


def check(case: Case, run: Run, x: ChainInput) -> None:
    """The reference's ids and ranks, and its log-probabilities; equal logits may be listed in another order."""
    part = first_requests(x)
    got, want = run(part), ours(case, part, "reference")
    assert torch.equal(got.ranks, want.ranks), f"{got.ranks} != {want.ranks}"
    listed = part.target.float().gather(1, got.top_ids)
    assert torch.equal(listed, part.target.float().gather(1, want.top_ids)), "other ids are listed"
    for name in ("logprobs", "top_logprobs"):
        assert torch.allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=3e-5), f"{name} differ"


def plain(x: ChainInput) -> TokenLogprobs:
    """As engines do it: log-probabilities of the whole vocabulary in float32."""
    logprobs = x.target.float().log_softmax(-1)
    own = logprobs.gather(1, x.draft_ids[:, :1])
    best, ids = logprobs.topk(TOP)
    ranks = (x.target > x.target.gather(1, x.draft_ids[:, :1])).sum(-1, dtype=torch.int32) + 1
    return TokenLogprobs(own[:, 0], ranks, ids, best, torch.zeros_like(ranks))


def rivals(case: Case, made: Sequence[ChainInput]) -> dict[str, Run]:
    """Plain PyTorch."""
    return {"log_softmax + topk": plain}
