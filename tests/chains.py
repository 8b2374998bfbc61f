"""Calls of verify_chain that its test files share."""

from __future__ import annotations

from typing import Any

import torch
from cases import ChainCase
from check import assert_same, of_the_reference

from specdec_kernels import ChainResult, RngKey, Sampling, verify_chain

NAMES = ChainResult._fields


def run(case: ChainCase, **more: Any) -> ChainResult:
    return verify_chain(case.draft_ids, case.target_logits, case.draft_logits, **{**case.keywords, **more})


def compare(case: ChainCase, device: str, **more: Any) -> ChainResult:
    """Decisions of the current backend against the reference's."""
    ours = run(case.to(device), **more)
    theirs = of_the_reference(ours, lambda: run(case, **more))
    cpu = [None if t is None else t.cpu() for t in ours]
    assert_same(tuple(cpu[:3]), tuple(theirs[:3]), NAMES[:3])
    if theirs.logprobs is not None:
        assert cpu[3] is not None
        torch.testing.assert_close(cpu[3], theirs.logprobs, rtol=1e-5, atol=2e-5)
    return theirs


def one(
    ids: list[int], target: list[list[float]], draft: list[list[float]] | None = None, **keywords: Any
) -> tuple[list[int], int, int]:
    """Verify one request given plain numbers: (token_ids, num_accepted, status)."""
    device = keywords.pop("device", "cpu")
    sampling = keywords.pop("sampling", Sampling())
    rng = keywords.pop("rng", RngKey(*(torch.tensor([v], device=device) for v in (7, 5, 0))))
    result = verify_chain(
        torch.tensor([ids], device=device).reshape(1, -1).long(),
        torch.tensor([target], device=device),
        None if draft is None else torch.tensor([draft], device=device),
        sampling=sampling,
        draft_sampling=None if draft is None else keywords.pop("draft_sampling", Sampling()),
        rng=rng,
        **keywords,
    )
    return result.token_ids[0].tolist(), int(result.num_accepted), int(result.status)
