"""Text as its tokens come: whole characters, joined as the tokenizer joins them, and no stop string."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from model_folders import pieces, save_tokenizer

from specdec_loop.serve.text import GrowingText

REPOSITORY = Path(__file__).resolve().parents[2] / "python/models/target"
SAMPLE = "def größe(x):\n    return '日本語 🙂' + x  # naïve\n\n\n" * 3


@pytest.fixture(scope="module", params=["bytes", "the repository's"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = REPOSITORY
    if request.param == "bytes":
        folder = tmp_path_factory.mktemp("tokenizer")
        save_tokenizer(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def grown(tokenizer: Any, ids: list[int], stops: list[str], seed: int) -> list[str]:
    """What each step showed, and in the end."""
    rng, text, shown, place = random.Random(seed), GrowingText(tokenizer, stops), [], 0
    while place < len(ids):
        count = rng.randrange(1, 6)
        shown.append("".join(piece.text for piece in text.push(ids[place : place + count], 0)))
        place += count
    return [*shown, "".join(piece.text for piece in text.finish())]


@pytest.mark.parametrize("seed", range(3))
def test_pieces_join_to_the_decoded_text(tokenizer: Any, seed: int) -> None:
    ids = tokenizer(SAMPLE)["input_ids"]
    shown = grown(tokenizer, ids, [], seed)
    assert "".join(shown) == SAMPLE
    assert not any("\ufffd" in part for part in shown)
    rng = random.Random(seed)
    noise = [rng.randrange(1, 257) for _ in range(200)]  # of the byte tokenizer most make no character
    assert "".join(grown(tokenizer, noise, [], seed)) == tokenizer.decode(noise, skip_special_tokens=True)


@pytest.mark.parametrize("stop", ["return", "\n\n\n", "🙂", "x", "no such thing", SAMPLE[-4:]])
def test_a_text_ends_before_its_first_stop_however_it_comes(tokenizer: Any, stop: str) -> None:
    ids = tokenizer(SAMPLE)["input_ids"]
    end = SAMPLE.find(stop) if stop in SAMPLE else len(SAMPLE)
    for seed in range(4):
        shown = grown(tokenizer, ids, ["never", stop], seed)
        assert "".join(shown) == SAMPLE[:end]


def test_pieces_say_which_tokens_were_accepted_drafts(tokenizer: Any) -> None:
    ids = tokenizer("ab cd ef")["input_ids"]
    text = GrowingText(tokenizer, ["zz"])
    pieces = [*text.push(ids[:3], 2), *text.push(ids[3:], 0), *text.finish()]
    assert [piece.is_accepted for piece in pieces] == [True, True, *[False] * (len(ids) - 2)]
    assert "".join(piece.text for piece in pieces) == "ab cd ef"


def test_a_continuation_keeps_the_space_that_pieces_begin_with() -> None:
    tokenizer = pieces("Hello", "▁Hello", "▁world")
    ids, space, end = tokenizer("Hello")["input_ids"], *tokenizer.convert_tokens_to_ids(["▁world", "</s>"])
    text = GrowingText(tokenizer, before=ids)
    assert [piece.text for piece in text.push([space, space], 1)] == [" world", " world"]
    text = GrowingText(tokenizer, [" world"], before=[*ids, end])
    assert text.push([space], 0) == [] == text.finish() and text.is_stopped
    assert GrowingText(tokenizer).push([space], 0)[0].text == "world"


def test_half_a_character_of_a_prompt_is_completed_by_its_continuation(tokenizer: Any) -> None:
    ids = tokenizer("日本語 🙂" * 3)["input_ids"]
    for place in range(1, len(ids)):
        text = GrowingText(tokenizer, before=ids[:place])
        shown = "".join(piece.text for piece in [*text.push(ids[place:], 0), *text.finish()])
        assert tokenizer.decode(ids[:place]).rstrip("\ufffd") + shown == "日本語 🙂" * 3


def test_a_piece_that_a_stop_may_begin_in_is_held_back(tokenizer: Any) -> None:
    ids = tokenizer("ab")["input_ids"]
    text = GrowingText(tokenizer, ["bc"])
    assert "".join(piece.text for piece in text.push(ids, 0)) == "a"
    assert "".join(piece.text for piece in text.finish()) == "b"
