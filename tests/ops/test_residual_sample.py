"""residual_sample: the reference's draws on every backend, the distribution, and agreement with verify_chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FILTERS, make_chain, make_rng
from check import assert_biased, assert_distribution, of_the_reference
from residuals import make_residual, move, run

from specdec_kernels import (
    ResidualSample,
    Sampling,
    residual_probs,
    residual_sample,
    verify_chain,
)
from specdec_kernels.ops.residual_sample import op

INF, NAN = float("inf"), float("nan")


def compare(device: str, case: dict[str, Any]) -> ResidualSample:
    case = {"rng": make_rng(len(case["target_logits"])), **case}
    ours = run(residual_sample, device, case)
    theirs: ResidualSample = of_the_reference(ours, lambda: run(residual_sample, "cpu", case))
    assert torch.equal(ours.token_ids.cpu(), theirs.token_ids)
    assert torch.equal(ours.status.cpu(), theirs.status)
    torch.testing.assert_close(ours.mass.cpu(), theirs.mass, rtol=1e-5, atol=1e-6)
    return theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("filters", FILTERS)
def test_draws_equal_the_reference(backend: str, device: str, is_slow: bool, filters: str, dtype: torch.dtype) -> None:
    batch = 5 if is_slow else 200  # two of them greedy
    compare(device, make_residual(batch, 600, filters=filters, dtype=dtype))
    compare(device, make_residual(batch, 600, filters=filters, dtype=dtype, a=0.4, greedy_every=3))
    compare(device, make_residual(2 if is_slow else 3, 9999, filters=filters, dtype=dtype))


def test_a_thousand_seeds_draw_alike(backend: str, device: str, is_slow: bool) -> None:
    compare(device, make_residual(1000, 90 if is_slow else 1025))


def test_draws_follow_the_residual_distribution(backend: str, device: str, is_slow: bool) -> None:
    batch = 1500 if is_slow else 100_000
    one = make_residual(1, 9)
    probs = run(residual_probs, device, one).probs[0].cpu()
    case: dict[str, Any] = {k: v.expand(batch, -1) if "logits" in k else v for k, v in one.items()}
    case["sampling"] = case["draft_sampling"] = Sampling()
    found = run(residual_sample, device, {**case, "rng": make_rng(batch)})
    counts = torch.bincount(found.token_ids.cpu(), minlength=9)
    assert_distribution(counts, probs, "residual")
    assert_biased(counts, one["target_logits"][0].softmax(0), "the target instead")


def test_it_is_the_draw_that_verify_chain_ends_with(backend: str, device: str) -> None:
    batch = 24
    chain = make_chain(batch, 1, 400, filters="all", closeness=2.0)
    result = verify_chain(
        chain.draft_ids.to(device),
        chain.target_logits.to(device),
        move(chain.draft_logits, device),
        **{k: move(v, device) for k, v in chain.keywords.items()},
    )
    assert chain.draft_logits is not None
    drawn = run(
        residual_sample,
        device,
        {
            "target_logits": chain.target_logits[:, 0],
            "draft_logits": chain.draft_logits[:, 0],
            **{k: chain.keywords[k] for k in ("sampling", "draft_sampling", "rng")},
        },
    )
    rejected = result.num_accepted == 0
    assert int(rejected.sum()) > 3
    assert torch.equal(drawn.token_ids[rejected], result.token_ids[rejected, 0])


def test_point_masses_and_no_draft(backend: str, device: str) -> None:
    case = make_residual(6, 70)
    case["draft_logits"] = case["draft_sampling"] = None
    compare(device, case)
    case["draft_ids"] = torch.tensor([3, 69, -1, 70, 0, 5])
    compare(device, case)
    compare(device, {**case, "a": 2.0, "b": 0.02})  # something is left of the id itself
    mixed = make_residual(6, 70)
    mixed["draft_sampling"] = Sampling(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5, 0.0]))
    mixed["draft_ids"] = torch.tensor([3, 3, -1, 3, 3, 69])
    compare(device, mixed)


def test_edges(backend: str, device: str) -> None:
    case = make_residual(6, 70)
    case["target_logits"][0, 69], case["target_logits"][1] = NAN, -INF
    case["draft_logits"][2, 0], case["draft_logits"][3, 7] = INF, NAN
    case["draft_logits"][4] = case["target_logits"][4]
    found = compare(device, case)
    assert found.status.tolist() == [1, 1, 2, 2, 8, 0]
    assert (found.token_ids >= 0).tolist() == [False, False, True, True, True, True]
    compare(device, make_residual(3, 1))
    compare(device, {**make_residual(3, 40), "a": 0.0})
    compare(device, {**make_residual(3, 40), "b": 0.0})
    assert run(residual_sample, device, {**make_residual(0, 4), "rng": make_rng(0)}).token_ids.shape == (0,)


def test_masks_and_reduced_vocabulary(backend: str, device: str) -> None:
    case = make_residual(6, 90)
    case["allowed"] = torch.randint(-(2**31), 2**31, (6, 3)).int() | 1
    compare(device, case)
    case["draft_logits"] = case["draft_logits"][:, :20]
    case["token_map"] = torch.randperm(90)[:20].int()
    compare(device, case)


def test_opcheck_and_out(backend: str, device: str) -> None:
    case = {**make_residual(3, 50), "rng": make_rng(3)}
    want = run(residual_sample, device, case)
    out = ResidualSample(*(torch.zeros_like(t) for t in want))
    assert run(residual_sample, device, {**case, "out": out}).token_ids is out.token_ids
    assert torch.equal(out.token_ids, want.token_ids)
    if backend != "reference":
        one = torch.ones(3, device=device)
        rng = move(make_rng(3), device)
        flat = (
            move(case["target_logits"], device),
            move(case["draft_logits"], device),
            one,
            one,
            *Sampling(),
            *Sampling(),
            *[None] * 9,
            *rng,
            2,
        )
        torch.library.opcheck(op.overload(backend), flat)
        torch.library.opcheck(op.overload(backend, out=True), (*flat, *out))


def test_wrong_arguments_say_what_to_do() -> None:
    case = make_residual(3, 9)
    with pytest.raises(ValueError, match="residual_sample: purpose must be one of"):
        run(residual_sample, "cpu", {**case, "rng": make_rng(3), "purpose": "rng"})
    with pytest.raises(ValueError, match=r"residual_sample: rng.seed must be \[3\], got \[2\]"):
        run(residual_sample, "cpu", {**case, "rng": make_rng(2)})
