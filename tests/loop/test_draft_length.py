"""Draft lengths: fixed, the best for what was measured, or as far as drafts promise well."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from exact_texts import distribution, many, surprise, tiny
from texts import text_of

from specdec_kernels import RngKey, Sampling, sample
from specdec_loop import AdaptiveLength, DraftModel, generate
from specdec_loop.draft_length import FORGIVEN, FixedLength
from specdec_loop.drafters.base import Confidence

FALSE_ALARM = 1e-6  # of the distribution test below; seeds are fixed, so an alarm would stay
SECONDS = {"draft": 0.0, "networks": 0.0, "target": 1.0, "verify": 0.0, "commit": 0.0}


def simulate(lengths: AdaptiveLength, rate: float, cost: float, steps: int = 400, verifying: float = 0.0) -> list[int]:
    """Lengths chosen where each candidate is accepted with `rate` and costs `cost` target forwards, or more."""
    g = torch.Generator().manual_seed(0)
    chosen = []
    for _ in range(steps):
        chosen.append(length := lengths.next())
        accepted = int((torch.rand(length, generator=g) < rate).long().cumprod(0).sum())
        seconds = {**SECONDS, "draft": cost * length, "verify": verifying * length}
        lengths.update([length], [accepted], seconds, length, 1 + accepted)
    return chosen


def time_of_a_call(lengths: FixedLength, rate: float, cost: float, tokens: int = 128, without: int = 0) -> float:
    """Steps without drafts that a call of eight requests takes as long as; it ends with the slowest.

    The first `without` requests accept nothing.
    """
    g, time, left = torch.Generator().manual_seed(0), 0.0, torch.full((8,), tokens)
    rates = torch.where(torch.arange(8) < without, 0.0, rate)[:, None]
    lengths.begin(lambda length: 1 + length)
    while (most := int(left.max())) > 0:
        length = lengths.next()
        accepted = (torch.rand(8, length, generator=g) < rates).long().cumprod(1).sum(1)
        slowest = accepted[10 * left >= 9 * most].tolist()
        left -= 1 + accepted
        nearer = most - max(int(left.max()), 0)
        lengths.update([length] * len(slowest), slowest, {**SECONDS, "verify": cost * length}, length, nearer)
        time += 1 + cost * length
    return time


def optimal_draft(rate: float, cost: float, longest: int) -> int:
    """The length of largest speed-up, (1 + P + .. + P^N) / (1 + N c)."""
    return max(range(longest + 1), key=lambda n: sum(rate**k for k in range(n + 1)) / (1 + n * cost))


@pytest.mark.parametrize(("rate", "cost"), [(0.9, 0.05), (0.6, 0.1), (0.2, 0.3), (0.75, 0.02)])
def test_it_finds_the_optimal_length(rate: float, cost: float) -> None:
    best = optimal_draft(rate, cost, 12)
    chosen = simulate(AdaptiveLength(12, memory=200), rate, cost)[-100:]
    assert sum(chosen) / 100 == pytest.approx(best, abs=1)


@pytest.mark.parametrize(("rate", "cost"), [(0.2, 0.3), (0.5, 0.6), (0.0, 0.01)])
def test_it_stops_where_no_draft_pays_and_tries_again_now_and_then(rate: float, cost: float) -> None:
    chosen = simulate(AdaptiveLength(12), rate, cost, 1000)
    assert any(chosen[-200:])
    assert max(chosen[-200:]) == 1
    spent = sum(1 + length * cost for length in chosen)
    assert spent < 1.04 * len(chosen)  # the steps alone: what is accepted comes on top


@pytest.mark.parametrize(("rate", "cost"), [(0.0, 0.5), (0.3, 1.0), (0.5, 0.45), (0.62, 0.5), (0.7, 0.6)])
def test_calls_whose_drafts_do_not_pay_are_little_slower_than_plain_decoding(rate: float, cost: float) -> None:
    lengths = AdaptiveLength(4)
    for _ in range(3):  # the slowest of eight requests gains less than the mean, which may seem to pay
        assert time_of_a_call(lengths, rate, cost) <= 128 * (1.05 + FORGIVEN)


@pytest.mark.parametrize(("rate", "cost"), [(0.7, 0.25), (0.8, 0.4), (0.9, 0.5)])
def test_a_call_is_not_held_up_by_drafts_of_requests_that_do_not_end_it(rate: float, cost: float) -> None:
    lengths = AdaptiveLength(4)
    for _ in range(3):
        assert time_of_a_call(lengths, rate, cost, without=2) <= 128 * (1.02 + FORGIVEN)


def test_calls_whose_drafts_pay_are_not_held_back() -> None:
    lengths = AdaptiveLength(6)
    adapted = [time_of_a_call(lengths, 0.8, 0.2) for _ in range(3)]
    fixed = min(time_of_a_call(FixedLength(n), 0.8, 0.2) for n in range(1, 7))
    assert max(adapted) < 1.1 * fixed < 0.75 * 128  # it has to learn which length that is


def test_a_new_call_does_not_pay_for_the_last_requests_of_the_old_one() -> None:
    lengths = AdaptiveLength(4)
    lengths.update([0], [0], SECONDS, 0, 1)
    for _ in range(10):
        lengths.update([4] * 8, [4] * 8, {**SECONDS, "verify": 0.8}, 4, 5)
    for _ in range(30):
        lengths.update([4], [0], {**SECONDS, "verify": 0.8}, 4, 1)
    assert lengths.next() == 0
    lengths.begin(lambda length: 1 + length)
    assert lengths.acceptance == pytest.approx((1 + 320) / (2 + 320 + 30))
    lengths.update([0], [0], SECONDS, 0, 1)  # this has not been measured for long
    assert lengths.next() == 4


def test_trees_are_grown_deeper_where_they_get_no_larger() -> None:
    lengths = AdaptiveLength(6)
    lengths.begin(lambda depth: min(1 + 3 * depth, 7))
    chosen = 0
    for _ in range(60):
        chosen = lengths.next()
        nodes = 1 if chosen == 0 else min(1 + 3 * chosen, 7)
        lengths.update([chosen], [chosen], {**SECONDS, "verify": 0.2 * (nodes - 1)}, chosen, 1 + chosen)
    assert chosen == 6


def test_the_time_of_a_step_without_drafts_is_measured_first() -> None:
    lengths = AdaptiveLength(4)
    assert lengths.next() == 0
    lengths.update([0], [0], SECONDS, 0, 1)
    assert lengths.next() > 0


def test_a_call_ends_with_the_request_that_has_most_tokens_to_go() -> None:
    text = text_of([1, 2], [3, 4, 5], [6])
    most, limit = text.left, text.left
    assert text.slowest == [0, 1, 2]
    text.rows[1] += [7] * (limit // 2)
    assert (text.left, text.slowest) == (most, [0, 2])
    text.finish(0, 2)
    text.finish(2, 1)
    assert (text.left, text.slowest) == (limit - limit // 2, [1])
    text.finish(1, 3)
    assert (text.left, text.slowest) == (0, [])


def test_it_begins_again_when_drafts_are_accepted_again() -> None:
    lengths = AdaptiveLength(8)
    assert simulate(lengths, 0.0, 0.1, 300)[-1] == 0
    assert sum(simulate(lengths, 0.95, 0.1, 200)[-50:]) / 50 > 6


def test_a_step_that_is_slow_once_does_not_decide_for_long() -> None:
    lengths = AdaptiveLength(4)
    lengths.update([0], [0], {**SECONDS, "target": 20.0}, 0, 1)  # of another program's making
    assert simulate(lengths, 0.1, 0.4, 400)[-100:].count(0) > 90


def test_a_machine_that_was_slow_for_a_while_is_measured_anew() -> None:
    """Drafts never pay. What plain decoding took while the machine was slow must not make them seem to."""
    lengths, drafts = AdaptiveLength(4), []
    for step in range(1200):
        length = lengths.next()
        slow = 1.5 if 300 <= step < 400 else 1.0
        seconds = {**SECONDS, "target": slow, "verify": slow * 1.1 * min(length, 1)}
        lengths.update([length], [min(length, 1)], seconds, length, 1 + min(length, 1))
        drafts.append(length > 0)
    assert sum(drafts[400:450]) < 10
    assert sum(drafts[450:]) < 750 * 0.15


def test_drafts_that_are_slow_once_are_not_left_out_for_long() -> None:
    lengths = AdaptiveLength(4)
    assert sum(simulate(lengths, 0.9, 0.05, 100)[-50:]) / 50 > 3
    lengths.update([4], [4], {**SECONDS, "target": 1000.0}, 4, 5)  # a kernel was compiled
    assert sum(simulate(lengths, 0.9, 0.05, 200)[-50:]) / 50 > 3


@pytest.mark.parametrize(("lengths", "most"), [([8, 8, 8, 8], 8), ([0, 0, 0, 8], 0), ([0, 0, 0, 0], 0)])
def test_as_many_columns_of_copies_are_verified_as_pay_for_the_whole_batch(lengths: list[int], most: int) -> None:
    policy = AdaptiveLength(8)
    for longest in (4, 8, 4, 8):  # a column takes .3 of a step: of four requests one alone does not pay for it
        seconds = {**SECONDS, "target": 1 + 0.3 * longest}
        policy.verified([longest] * 4)
        policy.update([longest] * 4, [longest] * 4, seconds, longest, 1 + longest)
    policy.update([0] * 4, [0] * 4, SECONDS, 0, 0)  # a step behind plain decoding: no trial
    assert policy.verified(lengths) == most
    assert policy.next() == 8  # looking up costs nothing: only `verified` decides


@pytest.mark.parametrize(("rate", "cost", "verifying"), [(0.9, 0.05, 0.1), (0.7, 0.1, 0.2), (0.8, 0.0, 0.1)])
def test_the_time_to_verify_a_token_counts(rate: float, cost: float, verifying: float) -> None:
    best = optimal_draft(rate, cost + verifying, 12)
    chosen = simulate(AdaptiveLength(12, memory=200), rate, cost, verifying=verifying)[-100:]
    assert sum(chosen) / 100 == pytest.approx(max(best, 1), abs=1)


def test_it_follows_a_change() -> None:
    lengths = AdaptiveLength(8, cost=0.05)
    assert min(simulate(lengths, 1.0, 0.0, 60)[-10:]) == 8
    assert max(simulate(lengths, 0.0, 0.0, 80)[-10:]) <= 1


def test_given_costs_do_not_look_at_the_time() -> None:
    slow, fast = AdaptiveLength(8, cost=0.1), AdaptiveLength(8, cost=0.1)
    assert simulate(slow, 0.7, 5.0) == simulate(fast, 0.7, 0.001)


def test_steps_without_drafts_teach_nothing_about_their_cost() -> None:
    lengths = AdaptiveLength(8)
    lengths.update([0, 0], [0, 0], SECONDS, 0, 1)
    assert lengths.cost == pytest.approx(0.1) and lengths.acceptance == 0.5


def test_fixed_is_fixed() -> None:
    lengths = FixedLength(5)
    lengths.update([5], [0], SECONDS, 5, 1)
    assert lengths.next() == 5


@pytest.mark.parametrize(
    "wrong", [{"longest": 0}, {"memory": 0.5}, {"memory": math.inf}, {"cost": -1.0}, {"cost": math.nan}]
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|must be"):
        AdaptiveLength(**wrong)


def test_lengths_that_adapt_leave_the_distribution_alone() -> None:
    texts = []
    for call in range(300):  # small batches, or the lengths would follow the mean of all
        arguments = many(requests=8)
        arguments["seed"] += call * 100_003
        lengths = AdaptiveLength(3, cost=0.2, memory=1.0)
        result = generate(tiny(0), DraftModel(tiny(1)), rule="ratio", draft_length=lengths, **arguments)
        texts += result.tokens
    assert surprise(texts, distribution(tiny(0), 1.0)) > FALSE_ALARM


# --- drafts that end early


@pytest.mark.parametrize("warm", [None, torch.tensor([1.0, 1.0, 0.0])])
def test_chains_end_where_their_chance_falls_in_the_mean(warm: torch.Tensor | None) -> None:
    confidence, text = Confidence(0.5), text_of([1, 2], [3, 4], [5, 6])
    sure, likely, unsure = torch.tensor([9.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])

    def is_lost(*rows: torch.Tensor) -> bool:
        rng = RngKey(torch.arange(3), torch.zeros(3).long())
        logits = torch.stack(rows)
        drawn = sample(logits, sampling=Sampling(temperature=warm), rng=rng, purpose="target", logprobs="raw")
        return confidence.is_lost(logits, drawn)

    confidence.begin(warm)
    confidence.start(text)
    assert not is_lost(sure, likely, unsure)  # 1, .73, .5
    assert not is_lost(sure, likely, likely)  # 1, .53, .37
    assert is_lost(sure, unsure, unsure)  # 1, .27, .18: .48
    text.finish(0, 2)
    confidence.start(text)
    assert not is_lost(unsure, sure, likely)  # a finished request has no say: 1, .73
    assert not is_lost(sure, sure, likely)  # 1, .53
    assert is_lost(sure, unsure, likely)  # .5, .39


@pytest.mark.parametrize("seed", range(20))  # whichever token is drawn
def test_a_chance_is_that_of_the_best_token_at_its_own_temperature(seed: int) -> None:
    warm, logits = torch.tensor([2.0, 0.5, 0.0]), torch.tensor([[1.0, 0.0]] * 3)  # .622, .881, .731: .745
    rng = RngKey(torch.arange(3) + seed, torch.zeros(3).long())
    drawn = sample(logits, sampling=Sampling(temperature=warm), rng=rng, purpose="target", logprobs="raw")
    for least, want in ((0.74, False), (0.75, True)):
        confidence = Confidence(least)
        confidence.begin(warm)
        confidence.start(text_of([1, 2], [3, 4], [5, 6]))
        assert confidence.is_lost(logits, drawn) is want
