"""Suffixes: what is promised to follow them, against counting in plain Python."""

from __future__ import annotations

import gc
import random
from collections import Counter

import pytest
from texts import text_of

from specdec_kernels import Sampling
from specdec_loop.drafters import SuffixDecoding
from specdec_loop.suffixes import Suffixes, Trie


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_those_of_plain_python(seed: int) -> None:
    """Texts in which much comes again, overlaps itself, and ends; two are remembered from before."""
    rng = random.Random(seed)
    past, rows = ([[rng.randrange(2 + seed) for _ in range(rng.randint(2, 40))] for _ in range(n)] for n in (2, 12))

    def follow(texts: list[list[int]], suffix: list[int], budget: int) -> tuple[float, list[int]]:
        score, product = 0.0, 1.0
        tokens: list[int] = []
        while len(tokens) < budget:
            known, size = suffix + tokens, len(suffix) + len(tokens)
            after = [text[i + size] for text in texts for i in range(len(text) - size) if text[i : i + size] == known]
            if not after:
                break
            counts = Counter(after)
            first = next(x for i, x in enumerate(after) if after[: i + 1].count(x) == max(counts.values()))
            product *= counts[first] / len(after)
            if product < 0.1:
                break
            score, tokens = score + product, [*tokens, first]
        return score, tokens

    def best(row: list[int]) -> list[int]:
        found = [follow(texts, row[-n:], min(5, 2 * n)) for texts in ([row], past) for n in range(len(row), 0, -1)]
        return max(found, key=lambda draft: draft[0])[1]  # the first of equals: the text itself, the longer suffix

    drafter, first = SuffixDecoding(depth=64, factor=2), text_of([7], [7])
    drafter.begin(first, rule="match", sampling=Sampling(), longest=5)
    for row, told in zip(first.rows, past, strict=True):
        row += told
    drafter.end(first)
    text = text_of(*(row[:2] for row in rows), limit=40)
    drafter.begin(text, rule="match", sampling=Sampling(), longest=5)
    for end in range(2, 41, 3):  # as the loop does: some tokens a step
        for row, whole in zip(text.rows, rows, strict=True):
            row[:] = whole[:end]
        assert [tokens for _, tokens in drafter.propose(text, 5)] == [best(row) for row in text.rows]


def test_a_text_makes_about_one_sequence_a_token_and_no_objects() -> None:
    """A sequence that occurs once has no children: 400 random tokens have 9 000 sequences of up to 24."""
    rng, trie = random.Random(1), Trie()
    row, suffixes = [rng.randrange(1000) for _ in range(400)], Suffixes(trie, 24)
    gc.collect()
    before = len(gc.get_objects())
    for i in range(len(row)):
        suffixes.learn(row, i)
    assert len(set(row)) < len(trie.counts) < 600
    assert len(gc.get_objects()) < before + 20  # that the garbage collector would look through


def test_only_so_much_is_remembered() -> None:
    """The older half is forgotten, the newer continuations are drafted."""
    drafter = SuffixDecoding(memory=40)
    for start in range(100, 1000, 100):  # of ten tokens each
        told = text_of([1])
        drafter.begin(told, rule="match", sampling=Sampling(), longest=4)
        told.rows[0] += range(start, start + 10)
        drafter.end(told)

    def drafted(token: int) -> list[int]:
        text = text_of([token])
        drafter.begin(text, rule="match", sampling=Sampling(), longest=4)
        return drafter.propose(text, 1)[0][1]

    assert [start for start in range(100, 1000, 100) if drafted(start)] == [700, 800, 900]
    assert drafted(900) == [901]
    with pytest.raises(ValueError, match="memory must be at least 0, got -1"):
        SuffixDecoding(memory=-1)
