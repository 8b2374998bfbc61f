"""Stops: ids, sequences and strings, wherever in a step they are complete."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_loop.stops import Stops


class Letters:
    """Id n is the n-th letter, 9 is special; it drops a leading space, as sentence pieces do."""

    all_special_ids = (9,)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(" abcdefgh|"[i] for i in ids if i < 9 or not skip_special_tokens).lstrip(" ")


@pytest.mark.parametrize(
    ("stop", "end"),
    [
        ([7], 5),
        ([[4, 7]], 5),
        ([[7, 1], 8], 6),
        ([[3, 4]], 4),
        (["cd"], 4),
        (["g", "cd"], 4),
        ("dc", None),
        (["zz", [4, 4]], None),
        ([], None),
    ],
)
def test_the_first_stop_that_is_complete_ends_the_text(stop: Any, end: int | None) -> None:
    assert Stops(stop, Letters()).end([1, 2, 3, 4, 7, 1, 8], 3) == end


def test_a_string_is_found_across_many_tokens_and_behind_a_space() -> None:
    tokens = [5] * 20 + [0, 1, 2, 3]
    assert Stops([" abc"], Letters()).end(tokens, 20) == 24
    assert Stops(["e" * 9], Letters()).end(tokens, 8) == 9


def test_a_string_may_begin_with_the_space_behind_a_prompt_and_never_within_the_prompt() -> None:
    assert Stops([" a"], Letters(), before=[8, 8]).end([0, 1], 0) == 2
    assert Stops([" a"], Letters()).end([0, 1], 0) is None
    assert Stops(["hab"], Letters(), before=[8, 8]).end([1, 2], 0) is None


def test_a_string_is_found_across_special_tokens_and_in_them() -> None:
    for stop, end in (("ab", 3), ("|", 2), ("a|b", 3), ("ba", None)):
        assert Stops([stop], Letters()).end([1, 9, 2], 0) == end
    assert Stops(["abc"], Letters()).end([5] * 20 + [1, *[9] * 30, 2, *[9] * 30, 3], 20) == 83
    assert Stops([" ab"], Letters(), before=[8, 8]).end([0, 1, *[9] * 30, 2], 0) == 33


@pytest.mark.parametrize("stop", [[[]], [""], ["a", []], ""])
def test_an_empty_stop_is_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match="none of them empty"):
        Stops(stop, Letters())


def test_a_string_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer must be given with a stop string"):
        Stops(["end"])
