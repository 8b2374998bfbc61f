"""Suffix drafts against counting in plain Python: texts that repeat and overlap themselves, windows that forget."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch

from specdec_kernels import SuffixDrafts, SuffixIndex, draft_suffixes

END = -1  # stands behind a remembered text


def follow(window: list[int], suffix: list[int], budget: int, least: float, depth: int) -> tuple[float, list[int]]:
    """The likeliest continuation of a suffix in a window of tokens."""
    score, product = 0.0, 1.0
    size, tokens = len(suffix), list[int]()
    starts = [i for i in range(len(window) - size + 1) if window[i : i + size] == suffix]
    while len(tokens) < budget and starts:
        if size == depth:
            starts = starts[:1]
        if len(starts) == 1:
            text = window[starts[0] + size :]
            rest = text[: text.index(END) if END in text else len(text)][: budget - len(tokens)]
            return score + product * len(rest), [*tokens, *rest]
        after = [window[i + size] for i in starts if i + size < len(window) and window[i + size] != END]
        if not after:
            break
        most = max(map(after.count, after))
        first = next(token for i, token in enumerate(after) if after[: i + 1].count(token) == most)
        product *= most / len(after)
        if product < least:
            break
        score, tokens, size = score + product, [*tokens, first], size + 1
        starts = [i for i in starts if window[i + size - 1 : i + size] == [first]]
    return score, tokens


def best(own: list[int], memory: list[int], length: int, factor: float, least: float, depth: int) -> Any:
    """The first of the best: the text's own, the longer suffix."""
    found = [
        follow(window, own[-m:], min(length, int(factor * m)), least, depth)
        for window in (own, memory)
        for m in range(min(depth - 1, len(own)), 0, -1)
    ]
    return max(found, key=lambda draft: draft[0], default=(0.0, []))


def drafted(texts: list[SuffixIndex], new: list[list[int]], length: int, **options: Any) -> list[tuple[float, Any]]:
    """Score and draft of each text, which the new tokens continue."""
    flat = torch.tensor([token for row in new for token in row], dtype=torch.int64)
    cu = torch.tensor([0, *(len(row) for row in new)]).cumsum(0)
    found = draft_suffixes(texts, flat, cu, length=length, **options)
    assert isinstance(found, SuffixDrafts) and found.token_ids.shape == (len(texts), length)
    assert all((row[n:] == -1).all() for row, n in zip(found.token_ids, found.lengths, strict=True))
    rows = [row[:n].tolist() for row, n in zip(found.token_ids, found.lengths, strict=True)]
    return list(zip(found.scores.tolist(), rows, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_drafts_are_those_of_counting(seed: int) -> None:
    """Requests of several tokens a step beside a memory that grows; windows so small that all forget, and larger."""
    rng = random.Random(seed)
    depth, factor, least = rng.choice([2, 3, 5, 16]), rng.choice([0.5, 1.0, 2.0]), rng.choice([0.01, 0.1, 0.3])
    vocab, own_room, room = rng.choice([1, 2, 3, 8]), rng.choice([depth, 20, 500]), rng.choice([depth, 40, 500])
    own_room, room = max(depth, own_room), max(depth, room)
    texts, rows = [SuffixIndex(depth=depth, capacity=own_room) for _ in range(3)], [list[int]() for _ in range(3)]
    memory, remembered = SuffixIndex(depth=depth, capacity=room), list[int]()
    for step in range(25):
        new = [[rng.randrange(vocab) for _ in range(rng.randint(0, 4))] for _ in rows]
        new[0] = rows[0][-6:-2] or new[0]  # this one copies itself
        for row, tokens in zip(rows, new, strict=True):
            row += tokens
        options = {"factor": factor, "least": least}
        got = drafted(texts, new, 9, memory=memory, **options)
        window = remembered[-room:]
        assert got == [best(row[-own_room:], window, 9, factor, least, depth) for row in rows]
        if step % 4 == 3:  # a text is complete, and another takes its place
            memory.remember(texts[step % 3], 2)
            whole = rows[step % 3]
            remembered += [*whole[max(2, len(whole) - own_room) :], END]
            texts[step % 3], rows[step % 3] = SuffixIndex(depth=depth, capacity=own_room), []


def test_a_factor_of_zero_drafts_nothing() -> None:
    text = SuffixIndex()
    text.append([1, 2, 3, 1, 2, 3])
    assert drafted([text], [[1, 2]], 4, factor=0.0) == [(0.0, [])]


def test_without_a_memory_a_text_has_its_own_drafts() -> None:
    text = SuffixIndex()
    text.append([1, 2, 3, 1, 2, 3, 1, 2, 4])
    # 1, 2 was followed by 3 twice and by 4 once: 3 with 2 / 3; then 1 and 2, always; then 3 as often as 4.
    assert drafted([text], [[1, 2]], 4, factor=2.0) == [(7 / 3, [3, 1, 2, 3])]
    assert drafted([text], [[]], 4, factor=2.0, least=0.7) == [(0.0, [])]
    assert drafted([text, SuffixIndex()], [[9], [5, 6, 5]], 4) == [(0.0, []), (1.0, [6])]
    assert len(text) == 12


def test_memory_is_bounded() -> None:
    """Texts that repeat themselves make most nodes; after a window nothing grows, whatever comes."""
    rng = random.Random(1)
    index, sizes = SuffixIndex(capacity=1000), []
    for _ in range(40):
        period = [rng.randrange(50) for _ in range(rng.randint(1, 200))]
        index.append((period * 1000)[:1000])
        sizes.append(index.num_bytes)
    assert max(sizes[3:]) <= 2 * max(sizes[:3]) and sizes[-1] < 2_000_000
    random_index = SuffixIndex(capacity=1 << 14)
    random_index.append(torch.randint(1 << 17, (1 << 14,)))
    assert random_index.num_bytes < 200 * (1 << 14)


def test_indexes_are_freed() -> None:
    import gc
    import resource

    def grow() -> int:
        for _ in range(30):
            SuffixIndex().append(torch.randint(1000, (20_000,)))
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    before = grow()
    assert sum(grow() - before for _ in range(3)) < 60_000  # 90 indexes of 4 MB are 360 MB


def test_calls_that_cannot_be_served_are_refused() -> None:
    text, ids = SuffixIndex(), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="depth must be at least 2, got 1"):
        SuffixIndex(depth=1)
    with pytest.raises(ValueError, match="capacity must be at least depth = 16, got 8"):
        SuffixIndex(capacity=8)
    with pytest.raises(ValueError, match=r"cu_tokens must be 2 numbers that rise from 0 to 2 .*, got \[0, 3\]"):
        draft_suffixes([text], ids, torch.tensor([0, 3]), length=4)
    with pytest.raises(
        ValueError, match=r"token_ids must be int32 or int64, of one dimension, on cpu, got torch.float"
    ):
        draft_suffixes([text], ids.float(), torch.tensor([0, 2]), length=4)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"texts": text}, "texts must be a list of SuffixIndex, got SuffixIndex"),
        ({"texts": [5]}, r"texts\[0\] must be a SuffixIndex, got int"),
        ({"memory": "m"}, "memory must be a SuffixIndex, got str"),
        ({"token_ids": [1, 2]}, "token_ids must be a tensor of int32 or int64, on cpu, got list"),
        ({"length": 2.5}, "length must be an int, got 2.5"),
        ({"factor": "1"}, "factor must be a number, got '1'"),
        ({"least": float("nan")}, "least must be a number, got nan"),
    ]
    for change, message in wrong:
        given = {"texts": [text], "token_ids": ids, "cu_tokens": torch.tensor([0, 2]), "length": 4}
        with pytest.raises(ValueError, match="draft_suffixes: " + message):
            draft_suffixes(**{**given, **change})
    with pytest.raises(ValueError, match="SuffixIndex: depth must be an int below"):
        SuffixIndex(depth=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SuffixIndex.remember: text must be a SuffixIndex, got int"):
        text.remember(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SuffixIndex.remember: start must be an int >= 0, got -2"):
        text.remember(SuffixIndex(), start=-2)
    with pytest.raises(ValueError, match="length must be at least 0, got -1"):
        draft_suffixes([text], ids, torch.tensor([0, 2]), length=-1)
    assert len(text) == 0


@pytest.mark.parametrize("places", [[0, 6, 2], [-4, 2, 2], [1, 1, 2], [0, 2], []])
def test_places_that_do_not_rise_are_refused(places: list[int]) -> None:
    texts = [SuffixIndex(), SuffixIndex()]
    with pytest.raises(ValueError, match="cu_tokens must be 3 numbers that rise from 0 to 2"):
        draft_suffixes(texts, torch.tensor([1, 2]), torch.tensor(places, dtype=torch.int64), length=4)
    assert [len(text) for text in texts] == [0, 0]


@pytest.mark.parametrize("ids", [[1, -1], [5 + 2**32], [1.5], [[1, 2]], torch.tensor(3), 5, "ab", [2**70]], ids=str)
def test_ids_that_cannot_be_are_refused(ids: Any) -> None:
    text = SuffixIndex()
    with pytest.raises(
        ValueError, match=r"SuffixIndex.append: token_ids must be (in \[0, 2\^31\)|int32 or int64|a seq)"
    ):
        text.append(ids)
    assert len(text) == 0
    text.append([])


def test_an_index_is_neither_copied_nor_remembered_by_itself() -> None:
    text = SuffixIndex()
    text.append([1, 2, 3])
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(text)
    with pytest.raises(ValueError, match="text must be another index"):
        text.remember(text)


def test_any_trust_is_a_number_of_drafts() -> None:
    text = SuffixIndex()
    text.append([1, 2, 3, 4, 1, 2, 3, 4])
    for factor in (4.0, 1e30, float("inf")):
        assert drafted([text], [[]], 4, factor=factor) == [(4.0, [1, 2, 3, 4])]
    assert drafted([text], [[]], 4, factor=1.0, offset=-1e30) == [(0.0, [])]
    wrong: list[dict[str, float]] = [{"factor": float("nan")}, {"factor": -1.0}, {"offset": float("nan")}]
    for options in wrong:
        with pytest.raises(ValueError, match="factor must be at least 0 and offset a number"):
            drafted([text], [[]], 4, **options)


def test_another_default_device_does_not_matter() -> None:
    nothing, places = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with torch.device("meta"):
        text = SuffixIndex()
        text.append([1, 2, 1])
        found = draft_suffixes([text], nothing, places, length=1)
    assert found.token_ids.tolist() == [[2]]
