"""Log-weights are differences to the row's maximum: no temperature, however small, draws an id of mass 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import RULES, make_chain, make_rng
from chains import compare as compare_chains
from residuals import make_residual, move, run
from shard_cases import extreme_call, run_on_ranks
from torch import Tensor
from tree_cases import TREE_RULES, make_tree

from specdec_kernels import Sampling, residual_sample, sample, token_logprobs, use_backend, verify_tree

TINY = [1e-30, 3e-38]  # 1 / 3e-38 = 3.3e37: logits that differ by more than 10 differ by more than float32 holds


def draw(logits: Tensor, device: str, temperature: float, **more: Any) -> Tensor:
    """Ids of `sample` that the reference draws too."""
    batch = len(logits)
    keywords = {"sampling": Sampling.full(batch, temperature=temperature), "rng": make_rng(batch), "purpose": "draft"}
    with use_backend("reference"):
        want = sample(logits, **{**keywords, **more}).token_ids
    moved = {name: move(value, device) for name, value in {**keywords, **more}.items()}
    found = sample(logits.to(device), **moved).token_ids.cpu()
    assert torch.equal(found, want)
    return found


@pytest.mark.parametrize("temperature", TINY)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4, 1e30])
def test_a_tiny_temperature_draws_the_largest_logit(
    backend: str, device: str, temperature: float, scale: float
) -> None:
    logits = scale * torch.randn(16, 5000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(logits, device, temperature)[:, 0], logits.argmax(1))


def test_a_temperature_whose_inverse_is_almost_infinite_has_log_probabilities(backend: str, device: str) -> None:
    """1 / 3.5e-39 is finite, 1.44 times that is not."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    ids = torch.stack([logits[0].argmax(), logits[1].argmin()])
    sampling = move(Sampling.full(2, temperature=3.5e-39), device)
    found = token_logprobs(logits.to(device), ids.to(device), sampling=sampling, logprobs="processed").logprobs
    assert found.tolist() == [0.0, float("-inf")]


def test_logits_near_the_largest_float_are_drawn_by_their_difference(backend: str, device: str) -> None:
    logits = torch.full((8, 300), -3.4e38)
    logits[:, 70], logits[:, 200] = 3.4e38, 3.39e38
    assert draw(logits, device, 1.0, num_samples=3).tolist() == [[70, 200, -1]] * 8
    # Two equal maxima: a fair coin, although each logit alone overflows at this temperature.
    logits[:, 200] = 3.4e38
    many = draw(logits[:1].expand(400, -1).contiguous(), device, 0.5)[:, 0]
    assert 140 < int((many == 70).sum()) < 260 and bool(((many == 70) | (many == 200)).all())  # 6 sigma


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_samples_behind_the_maximum_end_where_the_mass_ends(
    backend: str, device: str, filters: dict[str, float]
) -> None:
    """Differences up to 10 are finite log-weights at 3e-38, of mass 0; where a filter stays on it keeps the maximum."""
    logits = torch.full((6, 700), -50.0)
    for place, value in ((650, 9.0), (3, 8.0), (130, 5.0), (131, -0.5), (8, -20.0)):
        logits[:, place] = value
    kept = [650, 3, 130, 131] if not filters or "top_k" in filters else [650]
    sampling = Sampling.full(6, temperature=3e-38, **filters)  # type: ignore[arg-type]
    want = (kept + [-1] * 5)[:5]
    assert draw(logits, device, 3e-38, num_samples=5, sampling=sampling).tolist() == [want] * 6


def test_without_the_maximum_the_others_keep_their_log_weights(backend: str, device: str) -> None:
    logits = torch.full((3, 200), -50.0)
    logits[:, 20], logits[:, 30], logits[:, 40] = 2.0, 1.5, 1.0
    exclude = torch.tensor([[20], [30], [40]])
    assert draw(logits, device, 3e-38, exclude_ids=exclude)[:, 0].tolist() == [30, 20, 20]
    logits[:, 30], logits[:, 40] = -10.0, -11.0  # 12 and 13 below: all that is left overflows
    assert draw(logits, device, 3e-38, exclude_ids=exclude)[:, 0].tolist() == [-1, 20, 20]


def test_the_maximum_is_that_of_the_allowed_ids(backend: str, device: str) -> None:
    logits = torch.full((2, 64), -50.0)
    logits[:, 0], logits[:, 1], logits[:, 2] = 60.0, 40.0, 39.0
    bits = torch.full((2, 2), -1, dtype=torch.int32)
    bits[:, 0] = -2  # all but id 0, which lies too far above the others for a finite log-weight
    assert draw(logits, device, 3e-38, allowed=bits, num_samples=3).tolist() == [[1, 2, -1]] * 2


@pytest.mark.parametrize("temperature", TINY)
@pytest.mark.parametrize("rule", RULES)
def test_chains_at_tiny_temperatures_are_greedy(backend: str, device: str, rule: str, temperature: float) -> None:
    case = make_chain(12, 2, 700, rule=rule, drafts="point")
    case.keywords["sampling"] = Sampling.full(12, temperature=temperature)
    case.target_logits *= 8
    found = compare_chains(case, device)
    if rule in ("ratio", "block", "match"):
        last = found.num_accepted.long()
        drawn = found.token_ids[torch.arange(12), last]
        assert torch.equal(drawn, case.target_logits[torch.arange(12), last].argmax(1))


@pytest.mark.parametrize("temperature", TINY)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_trees_at_tiny_temperatures_are_greedy(backend: str, device: str, rule: str, temperature: float) -> None:
    case = make_tree(12, 7, 700, rule=rule, drafts="point")
    keywords = {**case.keywords, "sampling": Sampling.full(12, temperature=temperature)}
    rows = 8 * case.target_logits
    moved = {name: move(value, device) for name, value in keywords.items()}
    found = verify_tree(case.token_ids.to(device), case.parents.to(device), rows.to(device), **moved)
    with use_backend("reference"):
        want = verify_tree(case.token_ids, case.parents, rows, **keywords)
    assert torch.equal(found.token_ids.cpu(), want.token_ids) and torch.equal(found.path.cpu(), want.path)
    node = torch.nn.functional.pad(want.path, (1, 0))[torch.arange(12), want.num_accepted.long()].long()
    drawn = want.token_ids[torch.arange(12), want.num_accepted.long()]
    assert torch.equal(drawn, rows[torch.arange(12), node].argmax(1))


@pytest.mark.parametrize("temperature", TINY)
@pytest.mark.parametrize("drafts", ["model", "point", "none"])
def test_residuals_at_tiny_temperatures(backend: str, device: str, drafts: str, temperature: float) -> None:
    case = {**make_residual(12, 700), "rng": make_rng(12)}
    if drafts != "model":
        del case["draft_logits"], case["draft_sampling"]
        case["draft_ids"] = torch.arange(12) if drafts == "point" else torch.full((12,), -1)
    case["sampling"] = Sampling.full(12, temperature=temperature)
    case["target_logits"] = 8 * case["target_logits"]
    ours = run(residual_sample, device, case)
    with use_backend("reference"):
        want = run(residual_sample, "cpu", case)
    assert torch.equal(ours.token_ids.cpu(), want.token_ids)
    assert torch.equal(want.token_ids, case["target_logits"].argmax(1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_draw_the_same_at_tiny_temperatures(ranks: int) -> None:
    calls = [extreme_call(300, seed) for seed in range(3)]
    replies = run_on_ranks(ranks, calls)
    for i, call in enumerate(calls):
        want = call.one_rank().token_ids
        assert bool((want[:, 0] >= 0).all()) and bool((want == -1).any())
        for of_rank in replies:
            assert torch.equal(of_rank[i].results[0], want)  # type: ignore[arg-type]
