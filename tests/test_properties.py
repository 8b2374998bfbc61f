"""Any shape: a result within the contract, and the reference's decision."""

from __future__ import annotations

import torch
from cases import FILTERS, RULES, make_chain
from optional_hypothesis import HealthCheck, given, settings, st

from specdec_kernels import use_backend, verify_chain

SHAPES = {
    "batch": st.integers(0, 5),
    "draft": st.integers(0, 5),
    "vocab": st.integers(1, 400) | st.sampled_from([511, 512, 513, 2047, 2048, 2049, 4095, 4096, 4097]),
    "rule": st.sampled_from(RULES),
    "filters": st.sampled_from(sorted(FILTERS)),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    "drafts": st.sampled_from(["model", "stats", "point"]),
    "ragged": st.booleans(),
    "flat": st.booleans(),
    "greedy_every": st.integers(0, 3),
    "seed": st.integers(0, 2**20),
}


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**SHAPES)
def test_every_shape_keeps_the_contract(backend: str, device: str, is_slow: bool, **shape) -> None:  # type: ignore[no-untyped-def]
    if is_slow:
        shape["batch"] = min(shape["batch"], 2)
    case = make_chain(**shape)
    moved = case.to(device)
    result = verify_chain(
        moved.draft_ids, moved.target_logits, moved.draft_logits, **moved.keywords, logprobs="processed"
    )
    batch, draft, vocab = shape["batch"], shape["draft"], shape["vocab"]
    ids, accepted = result.token_ids.cpu(), result.num_accepted.cpu()
    assert ids.shape == (batch, draft + 1) and int(result.status.sum()) & ~(8 | 16) == 0
    column = torch.arange(draft + 1)
    assert torch.equal(ids >= 0, column <= accepted[:, None])  # exactly one drawn token, then -1
    assert bool((ids < vocab).all()) and bool((accepted <= draft).all())
    with use_backend("reference"):
        theirs = verify_chain(case.draft_ids, case.target_logits, case.draft_logits, **case.keywords)
    assert torch.equal(ids, theirs.token_ids)
    assert torch.equal(result.status.cpu(), theirs.status)
