"""The measured time of steps, as `allocate_drafts` wants it."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import allocate_drafts
from specdec_loop import StepTimes


def measured(*steps: tuple[int, float]) -> StepTimes:
    times = StepTimes()
    for tokens, seconds in steps:
        times.note(tokens, seconds)
    return times


def test_it_is_a_line_through_the_steps() -> None:
    table = measured(*((n, 3.0 + 0.5 * n) for n in (4, 6, 7, 12))).table(5, 20)
    assert table is not None
    torch.testing.assert_close(table, 5.5 + 0.5 * torch.arange(21.0))


def test_one_number_of_tokens_tells_nothing() -> None:
    times = measured((4, 1.0), (4, 1.1))
    assert times.table(4, 3) is None
    times.note(6, 1.2)
    assert times.table(4, 3) is not None


def test_what_was_measured_long_ago_is_forgotten() -> None:
    times = measured(*[(n, 9.0 * n) for n in range(1, 9)], *[(4, 1.0), (8, 1.4)] * 32)
    table = times.table(4, 4)
    assert table is not None
    torch.testing.assert_close(table, torch.tensor([1.0, 1.1, 1.2, 1.3, 1.4]))


@pytest.mark.parametrize("seconds", [(1.0, 0.2), (0.001, 5.0), (1.0, 1.0)])
def test_times_are_positive_and_never_fall(seconds: tuple[float, float]) -> None:
    table = measured((4, seconds[0]), (8, seconds[1])).table(1, 60)
    assert table is not None and bool((table > 0).all()) and bool((table.diff() >= 0).all())


def test_a_step_that_is_slow_once_counts_for_three() -> None:
    steps = [(4, 1.0), (8, 1.4)] * 10
    table, slow = measured(*steps).table(4, 8), measured(*steps, (8, 1000.0)).table(4, 8)
    assert table is not None and slow is not None
    assert bool((slow < 1.5 * table).all())


def test_the_allocation_ends_where_a_token_costs_more_than_it_brings() -> None:
    ids, chances = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[0.9] * 3, [0.2] * 3])
    cheap, dear = measured((2, 1.0), (8, 1.06)), measured((2, 1.0), (8, 4.0))
    costs = [times.table(2, 6) for times in (cheap, dear)]
    kept = [allocate_drafts(ids, chances, budget=6, cost=cost).num_draft.tolist() for cost in costs]
    assert kept == [[3, 1], [0, 0]]  # 4.679 tokens in 1.05 are no better than 4.639 in 1.04


@pytest.mark.parametrize("memory", [1, 2.5, None])
def test_a_wrong_memory_is_refused(memory: object) -> None:
    with pytest.raises(ValueError, match="memory must be an int >= 2"):
        StepTimes(memory)  # type: ignore[arg-type]
