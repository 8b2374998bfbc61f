"""The corpus: which files it takes, its split, its tokenizer and its windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_library import small_library

from specdec_loop import corpus


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return small_library(tmp_path / "library", monkeypatch)


def test_the_corpus_is_text_and_its_split_hangs_on_names_alone(library: Path) -> None:
    found = corpus.sources()
    assert found == sorted(found)
    assert {p.name for p in found} == {f"module_{n}.py" for n in range(150) if n % 30 != 7}
    held_out = [p for p in found if corpus.is_held_out(p)]
    assert 0 < len(held_out) < len(found) / 8
    assert held_out == [p for p in found if corpus.is_held_out(p, library)]


def test_the_tokenizer_gives_back_any_text(library: Path) -> None:
    tokenizer = corpus.train_tokenizer(corpus.read(corpus.sources()), 300)
    text = "déjà\tvu \n\n  x != 'y'  # 漢字\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokens = corpus.encode(tokenizer, ["ab", text])
    assert tokens.tolist() == [*tokenizer("ab")["input_ids"], 0, *tokenizer(text)["input_ids"], 0]


def test_windows_lie_within_the_corpus() -> None:
    tokens = torch.arange(50).short()
    drawn = corpus.windows(tokens, 200, 7, torch.Generator().manual_seed(0))
    assert bool((drawn.diff(dim=1) == 1).all()) and {0, 43} <= set(drawn[:, 0].tolist())
    assert corpus.even_windows(tokens, 3, 10)[:, 0].tolist() == [0, 20, 40]
