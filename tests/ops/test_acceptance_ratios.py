"""acceptance_ratios: the reference on every backend, and what verify_chain does with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FILTERS, ChainCase, make_chain, make_rng
from check import of_the_reference

from specdec_kernels import (
    RatioResult,
    RngKey,
    Sampling,
    acceptance_ratios,
    random_words,
    verify_chain,
)
from specdec_kernels.ops.acceptance_ratios import op

INF, NAN = float("inf"), float("nan")
_OWN = ("cu_draft", "max_draft", "sampling", "draft_sampling", "token_map", "allowed")


def run(case: ChainCase) -> RatioResult:
    keywords = {k: v for k, v in case.keywords.items() if k in _OWN}
    return acceptance_ratios(case.draft_ids, case.target_logits, case.draft_logits, **keywords)


def compare(case: ChainCase, device: str) -> RatioResult:
    ours = run(case.to(device))
    theirs = of_the_reference(ours, lambda: run(case))
    assert torch.equal(ours.status.cpu(), theirs.status)
    torch.testing.assert_close(ours.ratio.cpu(), theirs.ratio, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.overlap.cpu(), theirs.overlap, rtol=1e-5, atol=1e-6)
    return theirs


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("drafts", ["model", "point"])
def test_equals_the_reference(backend: str, device: str, is_slow: bool, filters: str, drafts: str) -> None:
    batch = 4 if is_slow else 8  # lengths 0 to 3
    for flat in (False, True):
        compare(
            make_chain(batch, 3, 301, filters=filters, drafts=drafts, ragged=True, flat=flat, greedy_every=3), device
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_over_several_tiles(backend: str, device: str, dtype: torch.dtype) -> None:
    compare(make_chain(3, 2, 9999, filters="top_p", dtype=dtype), device)


def test_verify_chain_accepts_below_the_ratio(backend: str, device: str) -> None:
    case = make_chain(40, 1, 90, closeness=1.5)
    ratio = run(case.to(device)).ratio[:, 0].cpu()
    word = random_words(case.keywords["rng"], purpose="coin", index=torch.zeros(1, dtype=torch.int64))
    coin = (word[:, 0] >> 8).float() * 2.0**-24
    moved = case.to(device)
    result = verify_chain(moved.draft_ids, moved.target_logits, moved.draft_logits, **moved.keywords)
    assert torch.equal(result.num_accepted.cpu() == 1, coin < ratio)


def test_edges(backend: str, device: str) -> None:
    case = make_chain(6, 2, 40)
    assert case.draft_logits is not None
    case.target_logits[0, 0, 3] = NAN
    case.draft_logits[1, 1] = -INF
    case.draft_ids[2, 0] = 40
    case.draft_ids[3, 1] = -1
    case.draft_logits[4, 0, case.draft_ids[4, 0]] = -INF
    found = compare(case, device)
    assert found.status.tolist() == [1, 2, 4, 0, 16, 0]
    assert found.ratio[2].tolist() == [0, 0] and float(found.ratio[3, 1]) == 0
    compare(make_chain(0, 2, 40), device)
    compare(make_chain(3, 0, 40), device)


def test_equal_distributions_overlap_fully_and_disjoint_ones_not_at_all(backend: str, device: str) -> None:
    ids = torch.tensor([[0], [1]])
    target = torch.tensor([[[1.0, 2.0, 0.0]] * 2, [[0.0, -INF, 0.0]] * 2])
    draft = torch.tensor([[[1.0, 2.0, 0.0]], [[-INF, 0.0, -INF]]])
    case = ChainCase(ids, target, draft, {"sampling": Sampling(), "draft_sampling": Sampling()})
    found = run(case.to(device))
    assert found.ratio.flatten().tolist() == pytest.approx([1.0, 0.0])
    assert found.overlap.flatten().tolist() == pytest.approx([1.0, 0.0])


def test_masks_and_reduced_vocabulary(backend: str, device: str) -> None:
    case = make_chain(6, 2, 90)
    case.keywords["allowed"] = torch.randint(-(2**31), 2**31, (18, 3)).int() | 1
    compare(case, device)
    token_map = torch.randperm(90)[:20].int()
    drafted = torch.randn(6, 2, 20)
    ids = token_map[drafted.argmax(-1)].long()
    keywords: dict[str, Any] = {"sampling": Sampling(), "draft_sampling": Sampling(), "token_map": token_map}
    compare(ChainCase(ids, case.target_logits, drafted, keywords), device)


def test_opcheck_and_out(backend: str, device: str) -> None:
    case = make_chain(3, 2, 50).to(device)
    want = run(case)
    out = RatioResult(*(torch.zeros_like(t) for t in want))
    keywords = {k: case.keywords[k] for k in ("sampling", "draft_sampling")}
    got = acceptance_ratios(case.draft_ids, case.target_logits, case.draft_logits, **keywords, out=out)
    assert got.ratio is out.ratio and torch.equal(out.overlap, want.overlap)
    if backend != "reference":
        flat = (
            case.draft_ids,
            case.target_logits,
            case.draft_logits,
            None,
            2,
            *Sampling(),
            *Sampling(),
            None,
            None,
            *[None] * 6,
        )
        torch.library.opcheck(op.overload(backend), flat)
        torch.library.opcheck(op.overload(backend, out=True), (*flat, *out))


def test_wrong_arguments_say_what_to_do() -> None:
    case = make_chain(3, 2, 9)
    with pytest.raises(ValueError, match="acceptance_ratios: draft_sampling must be given with draft_logits"):
        acceptance_ratios(case.draft_ids, case.target_logits, case.draft_logits, sampling=Sampling())
    with pytest.raises(ValueError, match=r"acceptance_ratios: target_logits must be .* = \[3, 3, 9\], got \[3, 2, 9\]"):
        acceptance_ratios(case.draft_ids, case.target_logits[:, :2], None, sampling=Sampling())
    assert isinstance(make_rng(1), RngKey)


@pytest.mark.parametrize("width", [0, 2])
def test_a_bad_draft_temperature_is_flagged_only_where_there_is_a_draft(backend: str, device: str, width: int) -> None:
    case = make_chain(3, width, 40)
    case.draft_ids[1] = -1
    case.keywords["draft_sampling"] = Sampling(torch.full((3,), NAN))
    assert compare(case, device).status.tolist() == ([64, 0, 64] if width else [0, 0, 0])
