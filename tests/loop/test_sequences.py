"""Text: what is taken of a step's tokens, where a text ends, and what the host knows of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from head_models import DRAFTERS, feature_head
from models import model
from texts import prompts
from torch import Tensor

from specdec_kernels import Sampling
from specdec_loop.drafters import Drafter, HeadChain
from specdec_loop.drafters.races import Race
from specdec_loop.generation import Generation, Hooks, generate
from specdec_loop.sequences import BAD_ROW, Sequences
from specdec_loop.stops import Stops

NO_STATUS = torch.zeros(2, dtype=torch.int32)


def new_text(limit: int = 6, stop: tuple[tuple[int, ...], ...] = ()) -> Sequences:
    prompts = torch.tensor([[1, 2, 3], [4, 0, 0]])
    return Sequences(
        prompts,
        torch.tensor([3, 1]),
        seed=torch.tensor([8, 9]),
        limits=[limit] * 2,
        stops=[Stops(stop)] * 2,
        overhang=4,
    )


def append(sequences: Sequences, rows: list[list[int]], status: torch.Tensor = NO_STATUS) -> list[int]:
    ids = torch.tensor(rows)
    drawn = 1 - (status & BAD_ROW)  # a bad row gives no token
    before = sequences.lengths
    followers = sequences.append(ids, (ids > -1).sum(1).int() - drawn)
    assert torch.equal(sequences.lengths, before + followers + 1)
    new, (taken,) = sequences.read(ids, status, followers)
    assert sequences.ends == sequences.lengths.tolist() and followers.tolist() == taken
    return [len(tokens) for tokens in new]


def test_prompts_begin_at_column_0_and_are_followed_by_nothing() -> None:
    text = new_text()
    assert text.rows == [[1, 2, 3], [4]]
    assert text.tokens.tolist() == [[1, 2, 3] + [-1] * 10, [4] + [-1] * 12]  # 3 columns, 6 to come, 4 of overhang
    assert text.longest == 3 and text.batch == 2


def test_tokens_are_taken_up_to_the_first_gap() -> None:
    text = new_text()
    assert append(text, [[5, 6, -1], [7, -1, -1]]) == [2, 1]
    assert text.rows == [[1, 2, 3, 5, 6], [4, 7]]
    assert [row[:n] for row, n in zip(text.tokens.tolist(), text.lengths.tolist(), strict=True)] == text.rows
    assert not any(text.is_finished)


def test_the_slowest_are_within_a_tenth_of_most_to_go() -> None:
    sequences = new_text(20)
    append(sequences, [[5, -1, -1, -1], [5, 6, -1, -1]])
    assert (sequences.left, sequences.slowest) == (19, [0, 1])
    append(sequences, [[5, -1, -1, -1], [5, 6, 7, -1]])
    assert (sequences.left, sequences.slowest) == (18, [0])


def test_the_limit_cuts_a_step() -> None:
    text = new_text(limit=4)
    assert append(text, [[5, 6, 7], [5, -1, -1]]) == [3, 1]
    assert append(text, [[8, 9, 9], [6, 7, -1]]) == [1, 2]
    assert text.is_finished == [True, False]
    assert append(text, [[8, 9, 9], [8, 9, -1]]) == [0, 1]
    assert text.rows == [[1, 2, 3, 5, 6, 7, 8], [4, 5, 6, 7, 8]]
    assert all(text.is_finished)
    assert int(text.tokens.max()) == 8  # nothing of what was cut is left


@pytest.mark.parametrize("steps", [[[5, 6, 7, 8]], [[5, -1], [6, 7], [8, -1]], [[5, 6], [7, 8]]])
def test_a_stop_sequence_is_found_across_steps_and_is_the_end(steps: list[list[int]]) -> None:
    text = new_text(stop=((6, 7), (3, 5)))  # 3, 5 begins in the prompt and does not count
    for step in steps:
        append(text, [step, [1] + [-1] * (len(step) - 1)])
    assert text.rows[0] == [1, 2, 3, 5, 6, 7]
    assert text.is_finished == [True, False]


def test_the_earliest_of_several_stops_counts() -> None:
    text = new_text(stop=((7,), (5, 6), (6, 7, 8)))
    append(text, [[5, 6, 7, 8], [7, 5, 6, -1]])
    assert text.rows == [[1, 2, 3, 5, 6], [4, 7]]


def test_a_bad_row_ends_its_request_alone() -> None:
    text = new_text()
    append(text, [[5, -1], [6, 7]], torch.tensor([BAD_ROW, 0], dtype=torch.int32))
    assert text.is_finished == [True, False] and text.rows == [[1, 2, 3, 5], [4, 6, 7]]
    append(text, [[5, 5], [6, 7]], torch.tensor([16, 2], dtype=torch.int32))
    assert text.status == [BAD_ROW, 2]  # what happens to a finished request is not its affair


@pytest.mark.parametrize("end", ["limit", "stop", "finish"])
def test_a_bad_row_behind_the_end_of_a_text_is_not_told(end: str) -> None:
    """Plain decoding does not come to it."""
    text = new_text(limit=2 if end == "limit" else 6, stop=((6,),) if end == "stop" else ())
    append(text, [[5, 6, 7, -1], [6, 7, 8, 9]], torch.tensor([BAD_ROW, 0], dtype=torch.int32))
    if end == "finish":
        text.finish(0, 5)
    assert text.status[0] == 0 and text.is_finished[0] and text.rows[0] == [1, 2, 3, 5, 6]


def test_noise_is_named_by_position_and_step() -> None:
    text = new_text()
    append(text, [[5, 6, -1], [7, -1, -1]])
    rng = text.rng(ahead=2)
    assert rng.seed.tolist() == [8, 9] and rng.position.tolist() == [7, 4]
    assert rng.step is not None and rng.step.tolist() == [1, 1]


def test_the_last_tokens_of_a_short_text_repeat_its_first() -> None:
    assert new_text().last(2).tolist() == [[2, 3], [4, 4]]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_bad_first_row_ends_its_own_text_alone(name: str) -> None:
    """The only token of its prompt is all that the text has: there is no pair to draft from."""

    class Spoiled(Hooks):
        def distribution(self, sequences: Sequences, draft: Any, logits: Tensor) -> Tensor:
            if sequences.lengths[0] == 1:
                logits[0] = torch.nan
            return logits

    def say(drafter: Drafter | None, starts: list[list[int]], **more: Any) -> Generation:
        cold = Sampling.full(len(starts), temperature=0.0)
        return generate(model(), drafter, starts, sampling=cold, max_new_tokens=8, stop=(), **more)

    got = say(DRAFTERS[name](), [[5], [6, 7]], hooks=Spoiled())
    assert got.status == [1, 0] and got.tokens[1] == say(None, [[6, 7]]).tokens[0]


@pytest.mark.parametrize("temperature", [0.001, 0.8])
def test_bad_sampling_is_flagged_whatever_the_confidence(temperature: float) -> None:
    sampling = Sampling(torch.tensor([temperature, 0.8]), top_p=torch.tensor([torch.nan, 1.0]))
    drafter = HeadChain(feature_head("mtp", model()), confidence=0.4)
    got, want = (generate(model(), d, prompts(2), sampling=sampling, max_new_tokens=9) for d in (drafter, None))
    assert got.status == want.status == [64, 0] and got.tokens == want.tokens


@pytest.mark.parametrize("lengths", [[3, 3], [3, 1]], ids=["even", "uneven"])
def test_noise_names_position_and_step_of_every_token(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are kept in a table, and those behind them; prompts are padded further than need be."""
    monkeypatch.setattr("specdec_loop.sequences.MOST_KEPT", 8)
    seed = torch.tensor([8, 9])
    sequences = Sequences(
        torch.ones(2, 5).long(), torch.tensor(lengths), seed=seed, limits=[9] * 2, stops=[Stops(())] * 2, overhang=4
    )
    race = Race(Sampling.full(2), sequences, [0, 2], has_step=True)
    for step in range(7):
        for ahead in range(4):
            here, there = sequences.rng(ahead), race.rng(sequences, ahead)
            assert here.position.tolist() == [n + step + ahead for n in lengths]
            assert there.position.tolist() == [n + step + ahead + offset for n in lengths for offset in (0, 2)]
            assert here.step is not None and there.step is not None
            assert here.step.tolist() == [step] * 2 and there.step.tolist() == [step] * 4
            assert here.seed.tolist() == [8, 9] and there.seed.tolist() == [8, 8, 9, 9]
        append(sequences, [[1, -1], [1, -1]])
