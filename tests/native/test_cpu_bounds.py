"""Shortcuts of the cpu backend that stand on a bound: rows built so that each bound is wrong, slack or just met."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specdec_kernels import (
    RngKey,
    Sampling,
    _native,
    race_noise,
    residual_probs,
    residual_sample,
    sample,
    verify_chain,
)

pytestmark = pytest.mark.skipif(_native.cpu_reason() is not None, reason=str(_native.cpu_reason()))
TILE = 2048


def _noise(batch: int) -> RngKey:
    at = torch.arange(batch)
    return RngKey(at * 7919 + 3, at * 5, at)


def _rows(batch: int, vocab: int, seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed))


def _logsumexp(row: Tensor, temperature: float) -> Tensor:
    return torch.logsumexp(row.double() / torch.tensor(temperature, dtype=torch.float32).double(), -1)


@pytest.mark.parametrize("temperature", [0.8, 1e-3, 1e-6, 1e6, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [(0, 60, 90), (0, -90, 120), (-3e4, 0, 1e4), (0, 3e38, 0), (-3e38, 5, 6)], ids=str)
def test_tiles_far_from_the_first_are_summed_exactly(
    steps: tuple[float, ...], dtype: torch.dtype, temperature: float, isa: str
) -> None:
    vocab = 3 * TILE + 70
    row = _rows(1, vocab, 5)
    for t, step in enumerate(steps):
        row[0, t * TILE : (t + 1) * TILE] += step
    row[0, TILE - 1] = -torch.inf
    logits = row.to(dtype)
    sampling = Sampling.full(1, temperature=temperature)
    result = sample(logits, sampling=sampling, rng=_noise(1), purpose="draft", backend="cpu")
    assert result.status.item() == 0
    want = _logsumexp(logits[0], temperature).float()  # infinite where l / T is
    torch.testing.assert_close(result.logsumexp[0], want, rtol=2e-7, atol=2e-6)


def test_a_row_with_one_token_has_exactly_its_mass(isa: str) -> None:
    logits = torch.full((4, 3 * TILE), -1e4)
    for b, at in enumerate((0, 5, TILE + 7, 3 * TILE - 1)):
        logits[b, at] = 13.3 * b
    result = sample(logits, sampling=Sampling.full(4, temperature=0.7), rng=_noise(4), purpose="draft", backend="cpu")
    assert result.token_ids[:, 0].tolist() == [0, 5, TILE + 7, 3 * TILE - 1]
    assert result.logprobs[:, 0].tolist() == [0.0] * 4


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"min_p": 0.1}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", ["nan", "negative nan", "infinity"])
@pytest.mark.parametrize("at", [0, 1, 17, 511, TILE - 1, TILE, TILE + 531, 3 * TILE - 1, 3 * TILE, 3 * TILE + 36])
def test_a_bad_logit_is_seen_wherever_it_stands(
    at: int, bad: str, dtype: torch.dtype, filters: dict[str, float], isa: str
) -> None:
    logits = _rows(2, 3 * TILE + 37, 11).to(dtype)
    logits[1, at] = torch.inf if bad == "infinity" else torch.nan
    if bad == "negative nan":
        bits = logits.view(torch.int32 if dtype == torch.float32 else torch.int16)
        bits[1, at] |= torch.iinfo(bits.dtype).min
    sampling = Sampling.full(2, temperature=0.8, **filters)
    result = sample(logits, sampling=sampling, rng=_noise(2), purpose="draft", backend="cpu")
    assert result.status[0] == 0
    assert result.status[1] != 0


@pytest.mark.parametrize("signs", ["both", "negative", "no larger than zero", "none finite but one"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_largest_logit_of_16_bits_is_that_of_torch(dtype: torch.dtype, signs: str, isa: str) -> None:
    logits = _rows(64, TILE + 37, 23)
    if signs != "both":
        logits = -logits.abs()
    if signs == "no larger than zero":
        logits[:, ::97] *= 0.0  # of either sign
        logits[:, 291::291] = logits[:, 291::291].abs()
    if signs == "none finite but one":
        logits = torch.full_like(logits, -torch.inf).scatter_(1, torch.arange(64)[:, None] * 31, -3.0)
    logits = logits.to(dtype)
    result = sample(logits, sampling=Sampling.full(64, temperature=0), rng=_noise(64), purpose="draft", backend="cpu")
    assert result.token_ids[:, 0].tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


@pytest.mark.parametrize("k", [1, 2, 50, 127, 1000, 3000, 6000])
@pytest.mark.parametrize(
    "shape", ["noise", "ties", "rising", "one block", "mostly masked", "louder", "quieter", "every 13th"]
)
def test_top_k_keeps_what_a_sort_keeps(shape: str, k: int, isa: str) -> None:
    vocab = 3 * TILE + 37
    logits = _rows(1, vocab, k)
    if shape == "ties":
        logits = logits.round()
    elif shape == "rising":
        logits = torch.linspace(-9, 9, vocab)[None]
    elif shape == "one block":  # all that is kept shares a few cells
        logits[0, 600:700] += 40
    elif shape == "mostly masked":
        logits[0, 100:] = -torch.inf
    elif shape == "every 13th":  # what is sampled of a list of all
        logits[0, ::13] += 4
    elif shape != "noise":  # what is sampled, where block maxima say too little
        logits[0, torch.arange(vocab) % TILE < 64] += 4 if shape == "louder" else -4
    result = sample(
        logits, sampling=Sampling.full(1, temperature=0.8, top_k=k), rng=_noise(1), purpose="draft", backend="cpu"
    )
    kth = logits[0].sort(descending=True).values[k - 1]
    kept = logits[0][(logits[0] >= kth) & (logits[0] > -torch.inf)]
    assert result.status.item() == 0
    torch.testing.assert_close(result.logsumexp[0].double(), _logsumexp(kept, 0.8), rtol=2e-7, atol=2e-6)
    if kth > -torch.inf:
        assert result.threshold.item() == kth


# Top-p looks between two logits that a sample suggests, of rows the first 64 ids of each tile. Chance misleads it in
# one row of fifty, "louder" and "quieter" samples nearly always, and no sample shows that few ids weigh most.
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("top_k", [0, 9000])
@pytest.mark.parametrize("shape", ["noise", "ties", "louder", "quieter", "few"])
def test_top_p_keeps_what_a_sort_keeps(shape: str, top_k: int, top_p: float, isa: str) -> None:
    batch, vocab = 60, 8 * TILE + 37
    logits = _rows(batch, vocab, int(100 * top_p), 1.5)
    is_sampled = torch.arange(vocab) % TILE < 64
    if shape == "ties":
        logits = (8 * logits).round() / 8
    elif shape == "few":
        logits[:, 70:8000:793] += 9
    elif shape != "noise":
        logits[:, is_sampled] += 1.5 if shape == "louder" else -1.5
    result = sample(
        logits, sampling=Sampling.full(batch, temperature=0.8, top_k=top_k, top_p=top_p), rng=_noise(batch),
        purpose="draft", backend="cpu",
    )  # fmt: skip
    listed = logits
    if top_k:
        listed = logits.where(logits >= logits.sort(descending=True).values[:, top_k - 1, None], -torch.inf)
    p = (listed.double() / torch.tensor(0.8).double()).softmax(1)
    threshold = result.threshold[:, None]
    kept, larger = ((p * part).sum(1) for part in (logits >= threshold, logits > threshold))
    assert (logits == threshold).any(1).all()
    assert (kept > top_p - 1e-6).all() and (larger < top_p + 1e-6).all()


@pytest.mark.parametrize("top_p", [0.0, -0.1, -1.0, -torch.inf])
def test_top_p_of_nothing_keeps_the_maximum(top_p: float, isa: str) -> None:
    logits = torch.stack([0.01 * _rows(1, TILE, 1)[0], _rows(1, TILE, 1)[0], torch.zeros(TILE)])
    result = sample(
        logits, sampling=Sampling.full(3, top_p=top_p), rng=_noise(3), purpose="draft", backend="cpu"
    )  # fmt: skip
    assert result.status.tolist() == [0, 0, 0]
    assert torch.equal(result.threshold, logits.amax(1))


# What lies below a level can be dropped whole. Where the likeliest ids miss top-p by a hair, and all others lie just
# under that level, nothing is left between the two.
@pytest.mark.parametrize("missing", [3e-4, 5e-4])
def test_top_p_beside_a_crowd_under_its_level(missing: float, isa: str) -> None:
    vocab, batch = 32000, 24
    g = torch.Generator().manual_seed(4)
    top_p = torch.tensor([1 - missing])
    heads = torch.cat([-0.05 * torch.arange(20.0), math.log(missing * 13 / 9) - 0.01 * torch.arange(8.0)])
    dropped = 1 - top_p.item()
    level = math.log(dropped * heads.double().exp().sum().item() / (1 - dropped) / vocab) - 1.02e-3
    logits = level - 2e-4 * torch.rand(batch, vocab, generator=g)
    for row in logits:
        row[torch.randperm(vocab, generator=g)[: len(heads)]] = heads
    result = sample(
        logits, sampling=Sampling(top_p=top_p.expand(batch).contiguous()), rng=_noise(batch), purpose="draft",
        backend="cpu",
    )  # fmt: skip
    p = logits.double().softmax(1)
    kept = (p * (logits >= result.threshold[:, None])).sum(1)
    assert (kept > top_p.item() - 4e-6).all()


# How close the draft is to the target decides how many ids the bound a p lets through: few, or crowds.
@pytest.mark.parametrize("apart", [3.0, 0.3, 1e-3, 0.0])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.25), (0.4, 1.0), (1.0, -0.5)], ids=str)
@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.95}], ids=str)
def test_a_bounded_residual_draw_is_the_race_of_its_weights(
    filters: dict[str, float], weights: tuple[float, float], apart: float, isa: str
) -> None:
    batch, vocab = 24, 2 * TILE + 37
    target = _rows(batch, vocab, 23)
    draft = target + _rows(batch, vocab, 29, apart)
    a, b = weights
    distribution = Sampling.full(batch, temperature=0.8, **filters)
    scales = {"a": torch.full((batch,), a), "b": torch.full((batch,), b)}
    distributions = {"sampling": distribution, "draft_sampling": distribution}
    drawn = residual_sample(target, draft, **scales, **distributions, rng=_noise(batch), backend="cpu")
    left = residual_probs(target, draft, **scales, **distributions, backend="cpu")
    scores = (
        left.probs.log().double() - race_noise(_noise(batch), torch.arange(vocab), purpose="residual").double().log()
    )
    empty = left.status != 0
    assert torch.equal(drawn.status, left.status)
    best = scores.max(-1)
    taken = scores.gather(1, drawn.token_ids[:, None])[:, 0]
    assert (taken >= best.values - 1e-4)[~empty].all()  # float32 scores: within rounding of the largest
    assert (drawn.token_ids == best.indices)[~empty].float().mean() > 0.9 or bool(empty.all())


def test_rejections_draw_the_same_by_either_weighing(isa: str) -> None:
    """Drafts that are likely under q alone: residual rows with much, little and no room, as the reference draws."""
    batch, vocab = 32, TILE + 300
    target = _rows(batch, 2 * vocab, 31).view(batch, 2, vocab)
    draft = target[:, :1] + _rows(batch, vocab, 37, 2.0)[:, None]
    ids = draft[:, 0].argmax(-1, keepdim=True)
    distribution = Sampling.full(batch, temperature=1.0)
    results = [
        verify_chain(
            ids, target, draft, sampling=distribution, draft_sampling=distribution, rng=_noise(batch), backend=backend
        )
        for backend in ("cpu", "reference")
    ]
    assert 0 < int(results[0].num_accepted.sum()) < batch
    assert torch.equal(results[0].token_ids, results[1].token_ids)
