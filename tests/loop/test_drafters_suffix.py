"""Suffix decoding in the loop; what follows a suffix is tested in tests/test_suffixes.py."""

from __future__ import annotations

import pytest
from texts import text_of

from specdec_kernels import Sampling
from specdec_loop.drafters import SuffixDecoding


def test_only_so_much_is_remembered() -> None:
    """The oldest tokens make room for the newest."""
    drafter = SuffixDecoding(memory=40)

    def begin(*rows: list[int]) -> object:
        text = text_of(*rows)
        drafter.begin(text, rule="match", sampling=Sampling(), longest=4)
        return text

    for start in range(100, 1000, 100):  # of ten tokens each
        told = begin([1])
        told.rows[0] += range(start, start + 10)
        drafter.end(told, range(told.batch))
    drafts = [drafter.propose(begin([start]), 1)[0][1] for start in range(100, 1000, 100)]
    assert drafts == [[]] * 6 + [[701], [801], [901]]


def test_without_a_memory_nothing_is_remembered() -> None:
    drafter = SuffixDecoding(memory=0)
    for _ in range(2):
        text = text_of([7])
        drafter.begin(text, rule="match", sampling=Sampling(), longest=4)
        assert drafter.propose(text, 4) == [(0.0, [])]
        text.rows[0] += [8, 9]
        drafter.end(text, [0])


@pytest.mark.parametrize("memory", [-1, 15])
def test_a_memory_too_small_is_refused(memory: int) -> None:
    with pytest.raises(ValueError, match=f"memory must be 0 or at least depth = 16, got {memory}"):
        SuffixDecoding(memory=memory)
