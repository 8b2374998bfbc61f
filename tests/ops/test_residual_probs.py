"""residual_probs: the correction distribution against its formula, and its edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FILTERS
from check import assert_no_worse, of_the_reference
from residuals import make_residual, run
from torch import Tensor

from specdec_kernels import ResidualProbs, Sampling, Status, residual_probs
from specdec_kernels.ops.residual_probs import op

INF, NAN = float("inf"), float("nan")


def compare(device: str, case: dict[str, Any]) -> ResidualProbs:
    ours = run(residual_probs, device, case)
    theirs: ResidualProbs = of_the_reference(ours, lambda: run(residual_probs, "cpu", case))
    assert torch.equal(ours.status.cpu(), theirs.status)
    torch.testing.assert_close(ours.mass.cpu(), theirs.mass, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.probs.cpu(), theirs.probs, rtol=2e-4, atol=2e-6)
    return theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("filters", FILTERS)
def test_equals_the_reference(backend: str, device: str, is_slow: bool, filters: str, dtype: torch.dtype) -> None:
    batch = 4 if is_slow else 7  # two of them greedy
    compare(device, make_residual(batch, 5001, filters=filters, dtype=dtype))
    compare(device, make_residual(batch, 130, filters=filters, dtype=dtype, a=0.5, b=1.5, greedy_every=3))


def test_rows_are_probabilities_no_worse_than_pytorch(backend: str, device: str) -> None:
    case = make_residual(5, 3000)
    found = run(residual_probs, device, case)
    exact = (case["target_logits"].double().softmax(1) - case["draft_logits"].double().softmax(1)).clamp(min=0)
    plain = (case["target_logits"].softmax(1) - case["draft_logits"].softmax(1)).clamp(min=0)
    assert_no_worse(found.mass.cpu(), plain.sum(1), exact.sum(1))
    assert_no_worse(found.probs.cpu(), plain / plain.sum(1, keepdim=True), exact / exact.sum(1, keepdim=True))
    torch.testing.assert_close(found.probs.sum(1).cpu(), torch.ones(5), rtol=1e-5, atol=0)


def test_without_a_draft_it_is_the_target(backend: str, device: str) -> None:
    case = make_residual(4, 60)
    case["draft_logits"] = case["draft_sampling"] = None
    found = compare(device, case)
    torch.testing.assert_close(found.probs, case["target_logits"].softmax(1), rtol=1e-5, atol=1e-7)


def test_point_mass_takes_its_id_out(backend: str, device: str) -> None:
    case = make_residual(4, 60)
    case["draft_logits"] = case["draft_sampling"] = None
    case["draft_ids"] = torch.tensor([3, 59, -1, 60])
    found = compare(device, case)
    assert found.probs[0, 3] == 0 and found.probs[1, 59] == 0
    assert found.status.tolist() == [0, 0, 0, 4]
    case = make_residual(4, 60)
    case["draft_sampling"] = Sampling(torch.tensor([0.0, 1.0, 0.0, 1.0]))
    case["draft_ids"] = torch.tensor([3, 3, -1, 3])
    compare(device, case)


def test_equal_rows_fall_back_to_the_target(backend: str, device: str) -> None:
    case = make_residual(3, 40)
    case["draft_logits"] = case["target_logits"].clone()
    found = compare(device, case)
    assert found.status.tolist() == [8, 8, 8] and found.mass.tolist() == [0, 0, 0]


def test_an_id_whose_weight_vanishes_has_none(backend: str, device: str) -> None:
    """The residual is empty: the draft has the target's maximum, and everything else lies e^-1000 and more below it."""
    target = torch.full((1, 70), -5.0)
    target[0, :3] = torch.tensor([7.0, 6.0, 3.0])
    draft = torch.zeros(1, 70)
    draft[0, 0] = 1000.0
    case = {
        "target_logits": target, "draft_logits": draft,
        "sampling": Sampling.full(1, temperature=1e-3), "draft_sampling": Sampling.full(1, temperature=1.0),
    }  # fmt: skip
    found = run(residual_probs, device, case)
    assert found.status.item() == Status.EMPTY_RESIDUAL and found.mass.item() == 0
    assert found.probs[0].nonzero().tolist() == [[0]]


def test_bad_rows(backend: str, device: str) -> None:
    case = make_residual(5, 40)
    case["target_logits"][0, 39], case["target_logits"][1] = NAN, -INF
    case["draft_logits"][2, 0], case["draft_logits"][3, 7] = INF, NAN
    found = compare(device, case)
    assert found.status.tolist() == [1, 1, 2, 2, 0]
    assert bool((found.probs[:2] == 0).all())


def test_masks_and_reduced_vocabulary(backend: str, device: str) -> None:
    case = make_residual(6, 90)
    case["allowed"] = torch.randint(-(2**31), 2**31, (6, 3)).int() | 1
    compare(device, case)
    case["draft_logits"] = case["draft_logits"][:, :20]
    case["token_map"] = torch.arange(20).int()
    compare(device, case)
    case["token_map"] = torch.randperm(90)[:20].int()
    case["token_map"][3] = 1000  # not an id: ignored
    compare(device, case)


@pytest.mark.parametrize("vocab", [1, 2, 33, 4096, 4097])
def test_odd_vocabularies_and_no_requests(backend: str, device: str, vocab: int) -> None:
    compare(device, make_residual(2, vocab))
    assert run(residual_probs, device, make_residual(0, vocab)).probs.shape == (0, vocab)


def test_opcheck_and_out(backend: str, device: str) -> None:
    case = make_residual(3, 50)
    want = run(residual_probs, device, case)
    out = ResidualProbs(*(torch.zeros_like(t) for t in want))
    assert run(residual_probs, device, {**case, "out": out}).probs is out.probs
    assert torch.equal(out.probs, want.probs)
    if backend != "reference":
        one = torch.ones(3, device=device)
        rows: tuple[Tensor, ...] = (case["target_logits"].to(device), case["draft_logits"].to(device))
        flat = (*rows, one, one, *Sampling(), *Sampling(), *[None] * 9)
        torch.library.opcheck(op.overload(backend), flat)
        torch.library.opcheck(op.overload(backend, out=True), (*flat, *out))


@pytest.mark.parametrize("start", [1, 2, 4])
def test_results_may_begin_at_any_number_of_a_buffer(backend: str, device: str, start: int) -> None:
    case = make_residual(3, 80)
    want = run(residual_probs, device, case)
    buffer = torch.full((start + 240 + 4,), -1.0, device=device)
    out = want._replace(probs=buffer[start : start + 240].view(3, 80))
    assert torch.equal(run(residual_probs, device, {**case, "out": out}).probs, want.probs)
    assert (buffer[:start] == -1).all() and (buffer[start + 240 :] == -1).all()


@pytest.mark.parametrize("weight", [0, 0.0, 0.5, 1, 3.5])
def test_a_weight_must_be_no_less_than_zero(weight: float) -> None:
    case = make_residual(3, 9)
    assert not (residual_probs(**{**case, "a": weight}).status & Status.BAD_SAMPLING).any()
    every = {**case, "a": torch.full((3,), float(weight))}
    assert torch.equal(residual_probs(**{**case, "a": weight}).probs, residual_probs(**every).probs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": -1.0}, r"a must be a finite float >= 0 or float32 \[batch\], got -1.0"),
        ({"b": NAN}, "b must be a finite float"),
        ({"a": torch.ones(4)}, r"a must be \[3\], got \[4\]"),
        ({"draft_sampling": None}, "draft_sampling must be given with draft_logits"),
        ({"draft_logits": torch.zeros(3, 99)}, r"token_map must be given where draft_vocab \(99\) is not vocab \(9\)"),
        ({"draft_logits": torch.zeros(3, 5)}, r"token_map must be given where draft_vocab \(5\) is not vocab \(9\)"),
        ({"draft_ids": torch.zeros(3).int()}, "draft_ids must be int64, got int32"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="residual_probs: " + message):
        run(residual_probs, "cpu", {**make_residual(3, 9), **change})
