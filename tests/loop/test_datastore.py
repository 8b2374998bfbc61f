"""The datastore: everything that followed the longest known end of a context, as plain Python finds it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from specdec_loop import Datastore


def search(corpus: list[list[int]], context: list[int], length: int, depth: int) -> list[list[int]]:
    for n in range(min(depth, len(context)), 0, -1):
        ends = [(row, i + n) for row in corpus for i in range(len(row) - n + 1) if row[i : i + n] == context[-n:]]
        if ends:
            return sorted(row[end : end + length] for row, end in ends if end < len(row))
    return []


@pytest.mark.parametrize("depth", [1, 4, 16])
def test_it_finds_what_plain_python_finds(depth: int) -> None:
    rng = random.Random(depth)
    corpus = [[rng.randrange(4) for _ in range(rng.randint(0, 60))] for _ in range(12)]
    store = Datastore.build(corpus, depth=depth)
    for _ in range(200):
        context = [rng.randrange(5) for _ in range(rng.randint(0, 20))]
        assert sorted(store.continuations(context, length=3, most=10**6)) == search(corpus, context, 3, depth)


def test_a_shorter_end_than_asked_for_is_not_looked_for() -> None:
    store = Datastore.build([[1, 2, 3, 4]])
    assert store.continuations([9, 2], length=2) == [[3, 4]]
    assert store.continuations([9, 2], length=2, shortest=2) == []
    assert store.continuations([1, 2], length=2, shortest=2) == [[3, 4]]


def test_many_hits_are_thinned_evenly() -> None:
    store = Datastore.build([[7, 10 + i] for i in range(1000)])
    assert store.continuations([7], length=1, most=10) == [[i] for i in range(10, 1010, 100)]


def test_a_file_is_mapped_and_says_the_same(tmp_path: Path) -> None:
    store = Datastore.build([[1, 2, 3], [1, 2, 4]])
    store.save(tmp_path / "store.pt")
    loaded = Datastore.load(tmp_path / "store.pt")
    assert len(loaded) == len(store) == 8
    assert loaded.continuations([1, 2], length=1) == [[3], [4]]
    torch.save({"kind": "something else"}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"must be a file that Datastore\.save wrote"):
        Datastore.load(tmp_path / "other.pt")
    (tmp_path / "text").write_text("no file of torch")
    with pytest.raises(ValueError, match=r"must be a file that Datastore\.save wrote"):
        Datastore.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError, match=r"Datastore: there is no file .*nowhere"):
        Datastore.load(tmp_path / "nowhere")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two, got 12"):
        Datastore.build([[1]], depth=12)
    with pytest.raises(ValueError, match="at least one, got none"):
        Datastore.build([])
    for least in (-1, -2):
        with pytest.raises(ValueError, match=f"sequences must be of token ids >= 0, got {least}"):
            Datastore.build([[1, 2], [3, least, 4]])
    with pytest.raises(ValueError, match=r"sequences must be of token ids below 2\^31 - 1, got 2147483648"):
        Datastore.build([[1, 2**31]])
