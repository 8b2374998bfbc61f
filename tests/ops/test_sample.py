"""sample: the race, the statistics it returns, and what may not be drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FILTERS, make_rng, mixed_sampling
from check import assert_biased, assert_distribution, assert_same, of_the_reference
from exact_chains import processed
from torch import Tensor

from specdec_kernels import RngKey, SampleResult, Sampling, race_noise, sample, use_backend
from specdec_kernels.ops.sample import op

NAMES = SampleResult._fields[:5]  # without `top`
INF, NAN = float("inf"), float("nan")


def _move(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(*(_move(v, device) for v in value)) if isinstance(value, (Sampling, RngKey)) else value


EDGE = 1e-6  # share of what top-k and min-p keep by which float32 sums may miss the mass that top-p wants


def compare(logits: Tensor, device: str, **keywords: Any) -> SampleResult:
    """Ids exactly as the reference's, statistics within rounding."""
    ours = sample(logits.to(device), **{k: _move(v, device) for k, v in keywords.items()})
    theirs = of_the_reference(ours, lambda: sample(logits, **keywords))
    assert torch.equal(ours.token_ids.cpu(), theirs.token_ids)
    assert torch.equal(ours.status.cpu(), theirs.status)
    assert_thresholds(logits, keywords, ours.threshold.cpu(), theirs.threshold)
    edge = (ours.threshold.cpu() < theirs.threshold) | (ours.threshold.cpu() > theirs.threshold)
    for name in ("logprobs", "logsumexp"):
        a, b = getattr(ours, name).cpu()[~edge], getattr(theirs, name)[~edge]
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
    return theirs


def assert_thresholds(logits: Tensor, keywords: dict[str, Any], ours: Tensor, theirs: Tensor) -> None:
    """The same raw logit, except where what lies from the higher one up weighs top_p within rounding."""
    moved = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    if not bool(moved.any()):
        return
    sampling = keywords["sampling"]
    with use_backend("reference"):
        others = sample(logits, **{**keywords, "sampling": sampling._replace(top_p=None)}).threshold
    for b in moved.nonzero()[:, 0].tolist():
        row, t = logits[b].float(), 1.0 if sampling.temperature is None else float(sampling.temperature[b])
        share = (row.double() / t).masked_fill(row < others[b], -INF).softmax(0)
        reached = float(share[row >= max(ours[b], theirs[b])].sum())
        assert abs(reached - float(sampling.top_p[b])) < EDGE, f"row {b}: {ours[b]} instead of {theirs[b]}"
        assert bool((row == ours[b]).any()), f"row {b}: {ours[b]} is no logit"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("filters", FILTERS)
def test_draws_and_statistics_equal_the_reference(
    backend: str, device: str, is_slow: bool, filters: str, dtype: torch.dtype
) -> None:
    batch = 5 if is_slow else 100  # two of them greedy
    logits = (3 * torch.randn(batch, 700)).to(dtype)
    for purpose in ("target", "draft"):
        compare(
            logits,
            device,
            sampling=mixed_sampling(batch, FILTERS[filters], 4),
            rng=make_rng(batch),
            purpose=purpose,
        )


@pytest.mark.parametrize("filters", ["none", "top_k", "top_p", "all"])
def test_a_thousand_seeds_draw_alike(backend: str, device: str, is_slow: bool, filters: str) -> None:
    vocab = 100 if is_slow else 1025
    logits = 2 * torch.randn(1000, vocab)
    compare(logits, device, sampling=Sampling.full(1000, **FILTERS[filters]), rng=make_rng(1000), purpose="target")


@pytest.mark.parametrize("filters", ["none", "top_k", "top_p", "min_p", "all"])
def test_several_tiles_and_extreme_rows(backend: str, device: str, filters: str) -> None:
    """Language-like, flat, all equal, peaked, two values, nearly all -inf: each over three tiles."""
    vocab = 9999
    rows = torch.randn(7, vocab) * torch.tensor([3.0, 0.01, 0.0, 3.0, 1.0, 1.0, 8.0])[:, None]
    rows[3, 77] = 60
    rows[4] = (rows[4] > 0).float()
    rows[5, 5:] = -INF
    compare(rows, device, sampling=Sampling.full(7, **FILTERS[filters]), rng=make_rng(7), purpose="draft")


@pytest.mark.parametrize("filters", ["none", "all"])
def test_rows_of_more_blocks_than_are_looked_at_at_once(backend: str, device: str, filters: str) -> None:
    """The winner may lie in the last of 2063 blocks; several of the best may lie on both sides of the first 2048."""
    rows = torch.randn(3, 132000, generator=torch.Generator().manual_seed(3))
    rows[0, 131990] = 30
    rows[1, 131072:] += 4
    more = {"sampling": Sampling.full(3, **FILTERS[filters]), "rng": make_rng(3), "purpose": "draft"}
    compare(rows, device, num_samples=4, **more)


@pytest.mark.parametrize("top_k", [1, 2, 63, 64, 65, 1000, 4097, 9998, 9999, 20000])
def test_every_size_of_top_k(backend: str, device: str, top_k: int) -> None:
    logits = 3 * torch.randn(3, 9999)
    logits[1] = (logits[1] * 2).round() / 2  # many ties at the threshold
    found = compare(logits, device, sampling=Sampling.full(3, top_k=top_k), rng=make_rng(3), purpose="draft")
    if top_k < 9999:
        kept = (logits >= found.threshold[:, None]).sum(1)
        assert int(kept[0]) == top_k and int(kept[1]) >= top_k


@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0])
def test_every_size_of_top_p(backend: str, device: str, top_p: float) -> None:
    logits = torch.randn(4, 9999) * torch.tensor([0.05, 1.0, 3.0, 6.0])[:, None]
    compare(logits, device, sampling=Sampling.full(4, top_p=top_p), rng=make_rng(4), purpose="draft")
    compare(logits, device, sampling=Sampling.full(4, top_p=top_p, top_k=3000), rng=make_rng(4), purpose="draft")


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_k": 50000}, {"top_k": 50000, "top_p": 0.5}], ids=str)
def test_filters_that_keep_tens_of_thousands(backend: str, device: str, filters: dict[str, float]) -> None:
    """More crowd around a threshold than a list holds; at the third, the mass that top-p wants is known last."""
    rows = 0.1 * torch.randn(1, 128256, generator=torch.Generator().manual_seed(7))
    compare(rows, device, sampling=Sampling.full(1, **filters), rng=make_rng(1), purpose="target")


def test_top_p_so_close_to_1_that_rounding_hides_what_it_drops(backend: str, device: str) -> None:
    """Equal logits, whose number is exact and whose sum is not; a few logits, which weigh all there is."""
    named: dict[str, Any] = {"rng": make_rng(4), "purpose": "draft"}
    compare(torch.ones(4, 4096), device, sampling=Sampling.full(4, top_p=0.999999), **named)
    sampling = Sampling(temperature=torch.tensor([0.3, 0.7, 1.0, 2.0]), top_p=torch.full((4,), 0.9999999))
    logits = torch.randn(4, 2048, generator=torch.Generator().manual_seed(11))
    for rest in (-INF, -1e4):
        compare(logits.where(torch.arange(2048) % 100 == 7, rest), device, sampling=sampling, **named)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x, "wide": lambda x: 3 * x, "huge": lambda x: 6e4 * x.clamp(-1, 1), "equal": torch.zeros_like,
    "capped": lambda x: (6 * x).clamp(max=5), "two values": lambda x: (x > 0) * 1.0,
    "spikes": lambda x: 2 * x + 4 * (x.abs() - 3).clamp(min=0), "masked": lambda x: x.masked_fill(x.abs() < 1, -INF),
    "ramp": lambda x: torch.arange(x.shape[-1]).expand_as(x) * (20 / x.shape[-1]),
}  # fmt: skip


@pytest.mark.parametrize("filters", ["top_p", "top_k", "min_p"])
@pytest.mark.parametrize("shape", SHAPES)
def test_top_p_of_every_shape_of_row_and_instruction_set(isa: str, shape: str, filters: str) -> None:
    p = torch.tensor([0.05, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1 - 1e-6])
    temperature = torch.tensor([1.0, 0.3, 1.0, 50.0, 1.0, 2.0, 1e30, 1.0])
    for seed, (vocab, dtype) in enumerate([(700, torch.float32), (32000, torch.bfloat16), (50257, torch.float16)]):
        torch.manual_seed(seed)
        order = torch.randperm(8)
        sampling = Sampling(temperature=temperature[order], top_p=p)
        if filters == "top_k":
            sampling = sampling._replace(top_k=torch.tensor([0, 1000, 0, 5, 0, 3000, 60, 600], dtype=torch.int32))
        if filters == "min_p":
            sampling = sampling._replace(min_p=torch.tensor([0, 0.01, 0, 0.2, 1e-4, 0, 0, 0.05]))
        rows = SHAPES[shape](torch.randn(8, vocab)).to(dtype)
        compare(rows, "cpu", sampling=sampling, rng=make_rng(8), purpose="target", backend="cpu")


def test_thresholds_equal_a_sort(backend: str, device: str) -> None:
    for filters in ("top_k", "top_p", "min_p", "all"):
        logits = 2 * torch.randn(5, 211)
        found = sample(
            logits.to(device),
            sampling=_move(Sampling.full(5, **FILTERS[filters]), device),
            rng=_move(make_rng(5), device),
            purpose="draft",
        )
        for row, threshold in zip(logits, found.threshold.tolist(), strict=True):
            kept = processed(row, **FILTERS[filters]) > 0  # type: ignore[arg-type]
            assert torch.equal(kept, row >= threshold), filters


@pytest.mark.parametrize("count", [2, 5, 64])
def test_many_samples_are_the_best_of_one_race_in_order(backend: str, device: str, count: int) -> None:
    logits = 2 * torch.randn(6, 5000)
    rng = make_rng(6)
    found = compare(logits, device, sampling=Sampling(), rng=rng, purpose="draft", num_samples=count)
    score = logits.double() - race_noise(rng, torch.arange(5000), purpose="draft").double().log()
    assert torch.equal(found.token_ids, score.sort(dim=1, descending=True).indices[:, :count])
    few = compare(logits, device, sampling=Sampling.full(6, top_k=3), rng=rng, purpose="draft", num_samples=count)
    assert bool((few.token_ids[:, 3:] == -1).all()) and bool((few.logprobs[:, 3:] == 0).all())


def test_second_samples_follow_the_distribution_without_replacement(backend: str, device: str, is_slow: bool) -> None:
    batch = 1500 if is_slow else 60_000
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    pair = torch.tensor([[0.0 if i == j else float(p[i] * p[j] / (1 - p[i])) for j in range(4)] for i in range(4)])
    found = sample(
        p.log().float().to(device).expand(batch, -1),
        sampling=Sampling(),
        rng=_move(make_rng(batch), device),
        purpose="draft",
        num_samples=2,
    ).token_ids.cpu()
    counts = torch.bincount(4 * found[:, 0] + found[:, 1], minlength=16)
    assert_distribution(counts, pair.flatten(), "pairs without replacement")
    assert_biased(counts, torch.outer(p, p).flatten(), "pairs with replacement")


def test_excluded_ids_are_not_drawn_but_counted(backend: str, device: str) -> None:
    logits = torch.randn(8, 40)
    top = logits.topk(3).indices
    exclude = torch.cat([top[:, :2], torch.full((8, 1), -1), torch.full((8, 1), 999)], dim=1)
    keywords: dict[str, Any] = {"sampling": Sampling.full(8, top_k=3), "rng": make_rng(8), "purpose": "draft"}
    plain = compare(logits, device, **keywords)
    found = compare(logits, device, **keywords, exclude_ids=exclude)
    assert torch.equal(found.token_ids[:, 0], top[:, 2])
    assert torch.equal(found.threshold, plain.threshold)
    nothing = compare(logits, device, **keywords, exclude_ids=top)
    assert nothing.token_ids.flatten().tolist() == [-1] * 8


def test_reduced_vocabulary_draws_by_target_id(backend: str, device: str) -> None:
    """The same distribution over the same target ids draws the same token, whatever the column order."""
    vocab = 50
    full = torch.full((6, vocab), -INF)
    columns = torch.randperm(vocab)[:20].int()
    small = torch.randn(6, 20)
    full[:, columns.long()] = small
    keywords: dict[str, Any] = {
        "sampling": Sampling.full(6, temperature=0.9, top_k=8),
        "rng": make_rng(6),
        "purpose": "target",
    }
    mapped = compare(small, device, **keywords, token_map=columns, num_samples=4)
    direct = compare(full, device, **keywords, num_samples=4)
    assert torch.equal(mapped.token_ids, direct.token_ids)


def test_allowed_and_lanes(backend: str, device: str) -> None:
    logits = torch.randn(9, 100)
    bits = torch.randint(-(2**31), 2**31, (9, 4)).int()
    bits[:, 0] |= 1
    compare(logits, device, sampling=Sampling.full(9, top_p=0.7), rng=make_rng(9), purpose="draft", allowed=bits)
    a = compare(logits, device, sampling=Sampling(), rng=make_rng(9), purpose="draft", lane=3)
    b = compare(logits, device, sampling=Sampling(), rng=make_rng(9), purpose="draft", lane=torch.full((9,), 3))
    assert torch.equal(a.token_ids, b.token_ids)


def test_bad_rows_emit_nothing(backend: str, device: str) -> None:
    logits = torch.randn(5, 80)
    logits[1, 3], logits[2, 70], logits[3] = NAN, INF, -INF
    found = compare(logits, device, sampling=Sampling.full(5, top_k=4), rng=make_rng(5), purpose="draft")
    assert found.status.tolist() == [0, 1, 1, 1, 0]
    assert (found.token_ids[:, 0] >= 0).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 4095, 4096, 4097])
def test_odd_vocabularies(backend: str, device: str, vocab: int) -> None:
    compare(torch.randn(2, vocab), device, sampling=Sampling.full(2, top_p=0.9), rng=make_rng(2), purpose="draft")


def test_raw_logprobs_ignore_the_filters(backend: str, device: str) -> None:
    logits = torch.randn(4, 60)
    found = compare(
        logits,
        device,
        sampling=Sampling.full(4, temperature=0.3, top_k=2),
        rng=make_rng(4),
        purpose="draft",
        logprobs="raw",
    )
    want = logits.log_softmax(1).gather(1, found.token_ids)
    torch.testing.assert_close(found.logprobs, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("filters", ["none", "all", "top_p"])
def test_result_does_not_depend_on_batch_or_slot(backend: str, device: str, filters: str) -> None:
    logits, rng, sampling = 3 * torch.randn(7, 5000), make_rng(7), Sampling.full(7, **FILTERS[filters])
    whole = sample(logits.to(device), sampling=_move(sampling, device), rng=_move(rng, device), purpose="draft")
    for order in (torch.tensor([4]), torch.tensor([6, 1])):
        part = sample(
            logits[order].to(device),
            sampling=Sampling(*(None if s is None else s[order].to(device) for s in sampling)),
            rng=RngKey(*(n[order].to(device) for n in rng)),
            purpose="draft",
        )
        assert_same(part[:5], tuple(t[order.to(device)] for t in whole[:5]), NAMES)


def test_opcheck_and_out(backend: str, device: str) -> None:
    logits, rng = torch.randn(3, 50, device=device), _move(make_rng(3), device)
    want = sample(logits, sampling=Sampling(), rng=rng, purpose="draft", num_samples=2)
    out = SampleResult(*(torch.zeros_like(t) for t in want[:5]))
    got = sample(logits, sampling=Sampling(), rng=rng, purpose="draft", num_samples=2, out=out)
    assert got.token_ids is out.token_ids
    assert_same(got[:5], want[:5], NAMES)
    if backend != "reference":
        flat = (logits, *Sampling(), *rng, 3, 2, *[None] * 7, 1)
        torch.library.opcheck(op.overload(backend), flat)
        torch.library.opcheck(op.overload(backend, out=True), (*flat, *out[:5]))


def test_raw_logprobs_are_the_softmax_of_all_logits(backend: str, device: str) -> None:
    """At temperature 1 without filters, where raw and processed differ by `allowed` alone."""
    logits = torch.randn(5, 31, generator=torch.Generator().manual_seed(2))
    allowed = torch.randint(2**31, (5, 1), generator=torch.Generator().manual_seed(3)).int()
    rng = RngKey(*(part.to(device) for part in make_rng(5)))
    common: dict[str, Any] = {"sampling": Sampling(), "rng": rng, "purpose": "target", "num_samples": 2}
    result = sample(logits.to(device), allowed=allowed.to(device), logprobs="raw", **common)
    want = logits.log_softmax(-1).gather(1, result.token_ids.cpu())
    torch.testing.assert_close(result.logprobs.cpu(), want, rtol=1e-5, atol=2e-5)


def test_the_last_id_of_the_last_word_may_be_the_only_one(backend: str, device: str) -> None:
    allowed = torch.tensor([[0, -(2**31)]], dtype=torch.int32, device=device)
    rng = RngKey(*(torch.tensor([v], device=device) for v in (7, 5, 0)))
    logits = torch.zeros(1, 64, device=device)
    result = sample(logits, sampling=Sampling(), rng=rng, purpose="target", allowed=allowed)
    assert result.token_ids.tolist() == [[63]]


@pytest.mark.parametrize(("vocab", "words"), [(32, 1), (33, 2), (62, 2), (64, 2), (65, 3)])
def test_allowed_must_have_a_word_for_32_ids(vocab: int, words: int) -> None:
    named: dict[str, Any] = {"sampling": Sampling(), "rng": make_rng(3), "purpose": "draft"}
    sample(torch.zeros(3, vocab), allowed=torch.full((3, words), -1, dtype=torch.int32), **named)
    for wrong in (words - 1, words + 1):
        with pytest.raises(ValueError, match=rf"allowed must be \[3, {words}\], got \[3, {wrong}\]"):
            sample(torch.zeros(3, vocab), allowed=torch.zeros(3, wrong, dtype=torch.int32), **named)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"purpose": "bonus"}, "purpose must be one of 'target', 'draft', 'residual', got 'bonus'"),
        ({"num_samples": 0}, r"num_samples must be an int in \[1, 64\], got 0"),
        ({"num_samples": 65}, r"num_samples must be an int in \[1, 64\], got 65"),
        ({"lane": -1}, r"lane must be an int in \[0, 2\^30\)"),
        ({"lane": 2**30}, r"lane must be an int in \[0, 2\^30\)"),
        ({"logprobs": None}, "logprobs must be one of 'processed', 'raw', got None"),
        ({"exclude_ids": torch.zeros(3).long()}, r"exclude_ids must be \[3, n\], got \[3\]"),
        ({"token_map": torch.zeros(9)}, "token_map must be int32, got float32"),
        ({"rng": make_rng(4)}, r"rng.seed must be \[3\], got \[4\]"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    keywords: dict[str, Any] = {"sampling": Sampling(), "rng": make_rng(3), "purpose": "draft", **change}
    with pytest.raises(ValueError, match="sample: " + message):
        sample(torch.zeros(3, 9), **keywords)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(1, 9)}, r"logits must be \[3, vocab\], got \[1, 9\]"),
        ({"logits": torch.zeros(9)}, r"logits must be \[3, vocab\], got \[9\]"),
        ({"logits": torch.zeros(3, 9, dtype=torch.float64)}, "logits must be float32 .*, got float64"),
        ({"logits": torch.zeros(3, 9, device="meta")}, "logits must be on cpu, got meta"),
        ({"k": 0}, "k must be a host int >= 1, got 0"),
        ({"k": "4"}, "k must be a host int >= 1, got '4'"),
        ({"k": 1025}, "k must be at most 1024, got 1025"),
        ({"token_map": torch.arange(4, dtype=torch.int32)}, r"token_map must be \[9\], got \[4\]"),
        ({"token_map": list(range(9))}, "token_map must be a tensor of int32, got list"),
    ],
)
def test_candidates_of_other_rows_are_not_kept(change: dict[str, Any], message: str) -> None:
    drawn = sample(torch.zeros(3, 9), sampling=Sampling(), rng=make_rng(3), purpose="draft")
    with pytest.raises(ValueError, match="SampleResult.keep: " + message):
        drawn.keep(**{"logits": torch.zeros(3, 9), "k": 4, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": -1}, "batch must be an int >= 0, got -1"),
        ({"batch": 2.0}, "batch must be an int >= 0, got 2.0"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": [0.5, 0.7]}, r"temperature must be a number, got \[0.5, 0.7\]"),
        ({"top_k": 1.5}, r"top_k must be an int below 2\^31, got 1.5"),
        ({"top_k": 2**31}, r"top_k must be an int below 2\^31, got 2147483648"),
    ],
)
def test_parameters_that_are_no_numbers_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="Sampling.full: " + message):
        Sampling.full(**{"batch": 2, **change})
