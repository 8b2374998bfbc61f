"""Counts of a run, and the clock that splits its time."""

from __future__ import annotations

import time

import pytest
import torch

from specdec_loop.statistics import PHASES, Clock, RequestStatistics, acceptance_by_child, expected_tokens


def test_acceptance_counts_what_was_looked_at() -> None:
    request = RequestStatistics(drafted=[3, 3, 1, 0], accepted=[3, 1, 0, 0], tokens=8, seconds=2.0)
    # Position 0: offered three times, accepted twice. Position 1: reached twice, once accepted. Position 2: once.
    assert request.acceptance_by_position() == pytest.approx([2 / 3, 1 / 2, 1.0])
    assert request.steps == 4
    assert request.tokens_per_step == 7 / 4  # the first of the eight came with the prompt
    assert request.tokens_per_second == 3.5


def test_shares_of_children_add_up_to_the_acceptance() -> None:
    assert acceptance_by_child([0, 2, 0], 4) == pytest.approx([0.5, 0.0, 0.25])
    assert acceptance_by_child([], 4) == [0.0]


def test_a_request_without_steps_has_no_speed() -> None:
    request = RequestStatistics()
    assert (request.tokens_per_step, request.tokens_per_second, request.acceptance_by_position()) == (0.0, 0.0, [])


def test_the_clock_gives_each_phase_its_time() -> None:
    clock = Clock(torch.device("cpu"))
    for phase, seconds in (("draft", 0.01), ("target", 0.03), ("draft", 0.01)):
        time.sleep(seconds)
        clock.mark(phase)
    elapsed = clock.settle()
    assert set(clock.seconds) == set(PHASES)
    assert clock.seconds["draft"] >= 0.02 and clock.seconds["target"] >= 0.03
    assert clock.seconds["verify"] == 0
    assert sum(clock.seconds.values()) == pytest.approx(elapsed, abs=2e-3)
    clock.mark("verify")
    clock.begin()  # and what was marked is forgotten
    assert clock.settle() < 0.01 and clock.seconds["verify"] == 0
    clock.mark("verify")
    clock.settle()
    assert clock.latest["draft"] == 0 and clock.seconds["draft"] >= 0.02  # latest: of one step; seconds: of all


def test_expected_tokens_take_grids() -> None:
    rate, draft = torch.tensor([[0.8], [1.0], [0.0]]), torch.tensor([0, 4])
    want = torch.tensor([[1, 3.3616], [1, 5], [1, 1]]).double()
    assert torch.allclose(expected_tokens(rate, draft), want)
