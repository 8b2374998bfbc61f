"""Text behind other text: the last tokens of a prompt, and what tokens add to it."""

from __future__ import annotations

from typing import Any

import pytest
from model_folders import pieces

from specdec_loop.continuation import tail, text_behind


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return pieces("Hello", "▁Hello", "▁world")


def ids(tokenizer: Any, *tokens: str) -> list[int]:
    return list(tokenizer.convert_tokens_to_ids(list(tokens)))


def test_tokens_add_their_space_behind_others_and_none_at_the_beginning(tokenizer: Any) -> None:
    hello, world, end = ids(tokenizer, "▁Hello", "▁world", "</s>")
    assert text_behind(tokenizer, [], [world]) == "world"
    assert text_behind(tokenizer, [hello], [world, world]) == " world world"
    assert text_behind(tokenizer, [hello], [end, world]) == "</s> world"
    assert text_behind(tokenizer, [hello], [end, world], skip_special=True) == " world"
    assert text_behind(tokenizer, [hello], [end], skip_special=True) == ""


def test_a_character_that_tokens_complete_is_theirs(tokenizer: Any) -> None:
    hello, *parts = ids(tokenizer, "▁Hello", "<0xC3>", "<0xA9>")
    assert text_behind(tokenizer, [hello, parts[0]], [parts[1]]) == "é"
    assert text_behind(tokenizer, [hello], parts[:1]) == "\ufffd"


def test_the_end_of_a_text_begins_with_a_whole_character(tokenizer: Any) -> None:
    (hello,), smile = ids(tokenizer, "▁Hello"), ids(tokenizer, "<0xF0>", "<0x9F>", "<0x99>", "<0x82>")
    assert tail(tokenizer, []) == [] and tail(tokenizer, smile[:2]) == smile[:2]
    assert tail(tokenizer, [hello] * 20) == [hello] * 5
    for count in range(2, 5):  # of the other tokens behind it: five tokens begin amid it
        assert tail(tokenizer, [hello] * 9 + smile + [hello] * count) == smile + [hello] * count
    assert tail(tokenizer, smile[1:] * 5) == []
