"""count_tokens: what a text holds, whatever the order, the slots and the backend."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from specdec_kernels import TokenCounts, count_tokens
from specdec_kernels.ops.count_tokens import op  # noqa: F401 - the backends of this file's tests


def moved(counts: TokenCounts, device: str) -> TokenCounts:
    return TokenCounts(*(part.to(device) for part in counts))


def test_counts_what_a_counter_counts(backend: str, device: str) -> None:
    g = torch.Generator().manual_seed(1)
    counts = TokenCounts.empty(5, 40, device=device)
    slots = torch.tensor([3, 0, 4], dtype=torch.int32, device=device)
    prompt, told = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for step in range(6):
        tokens = torch.randint(-1, 40, (3, 7), generator=g)
        status = count_tokens(counts, tokens.to(device), slots=slots, is_prompt=step == 0)
        assert status.tolist() == [0, 0, 0]
        for slot, row in zip(slots.tolist(), tokens.tolist(), strict=True):
            (prompt if step == 0 else told).update((slot, x) for x in row if x >= 0)
    for slot in range(5):
        ids = {x for s, x in [*prompt, *told] if s == slot}
        assert counts.of(slot) == {x: (told[slot, x], (slot, x) in prompt) for x in sorted(ids)}


def test_what_is_undone_was_never_counted(backend: str, device: str) -> None:
    counts = TokenCounts.empty(1, 20, device=device)
    count_tokens(counts, torch.tensor([[4, 9, 4]], device=device), is_prompt=True)
    count_tokens(counts, torch.tensor([[9, 7, 7, 3]], dtype=torch.int32, device=device))
    count_tokens(counts, torch.tensor([[7, 3, -1]], device=device), undo=True)
    assert counts.of(0) == {4: (0, True), 7: (1, False), 9: (1, True)}


def test_a_full_table_is_flagged_and_keeps_what_it_has(backend: str, device: str) -> None:
    counts = TokenCounts(*(torch.full((2, 4), v, dtype=torch.int32, device=device) for v in (-1, 0)))
    tokens = torch.tensor([[1, 2, 3, 4, 4, 9], [5, 6, 7, 8, 8, 8]], device=device)
    assert count_tokens(counts, tokens).tolist() == [32, 0]
    assert len(counts.of(0)) == 4 and sum(times for times, _ in counts.of(0).values()) >= 4
    assert counts.of(1) == {5: (1, False), 6: (1, False), 7: (1, False), 8: (3, False)}


def test_a_slot_out_of_range_is_flagged_and_one_left_out_is_not(backend: str, device: str) -> None:
    counts = TokenCounts.empty(2, 8, device=device)
    tokens = torch.tensor([[1], [2], [3]], device=device)
    slots = torch.tensor([2, -1, 1], dtype=torch.int32, device=device)
    assert count_tokens(counts, tokens, slots=slots).tolist() == [32, 0, 0]
    assert counts.of(0) == {} and counts.of(1) == {3: (1, False)}


def test_ids_that_meet_in_a_table_are_told_apart(backend: str, device: str) -> None:
    counts = TokenCounts(*(torch.full((1, 64), v, dtype=torch.int32, device=device) for v in (-1, 0)))
    tokens = torch.arange(64, device=device)[None] * 4096 + 5
    assert count_tokens(counts, tokens).tolist() == [0]
    assert counts.of(0) == dict.fromkeys(tokens[0].tolist(), (1, False))


def test_what_no_table_can_hold_is_no_token(backend: str, device: str) -> None:
    counts = TokenCounts.empty(1, 16, device=device)
    tokens = torch.tensor([[2**31 - 1, 2**31, 2**32 + 5, 2**40, -(2**32) + 7, -1]], device=device)
    assert count_tokens(counts, tokens).tolist() == [0]
    assert counts.of(0) == {2**31 - 1: (1, False)}


def test_slots_are_cleared_and_copied() -> None:
    counts = TokenCounts.empty(3, 8)
    count_tokens(counts, torch.tensor([[1, 1], [2, 3]]))
    counts.copy(torch.tensor([1]), torch.tensor([2]))
    counts.clear(torch.tensor([0]))
    assert (counts.of(0), counts.of(1), counts.of(2)) == ({}, *({2: (1, False), 3: (1, False)},) * 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_padding_are_left_out(dtype: torch.dtype) -> None:
    counts, slots = TokenCounts.empty(3, 8), lambda *numbers: torch.tensor(numbers, dtype=dtype)
    count_tokens(counts, torch.tensor([[1, 1], [2, 3], [4, 5]]))
    first, second, third = {1: (2, False)}, {2: (1, False), 3: (1, False)}, {4: (1, False), 5: (1, False)}
    counts.clear(slots())
    counts.clear(slots(-1, -1))
    counts.copy(slots(-1, 0, -1), slots(0, -1, -1))
    assert [counts.of(slot) for slot in range(3)] == [first, second, third]
    counts.copy(slots(-1, 2, 0), slots(2, 1, -1))
    assert [counts.of(slot) for slot in range(3)] == [first, third, third]
    counts.clear(slots(-1, 1))
    assert [counts.of(slot) for slot in range(3)] == [first, {}, third]
    TokenCounts.empty(0, 8).clear(slots(-1))  # a batch of padding alone
    TokenCounts.empty(0, 8).copy(slots(-1), slots(-1))


def test_slots_that_cannot_be_are_refused() -> None:
    counts, none = TokenCounts.empty(3, 8), TokenCounts()
    for call in (
        lambda: none.of(0),
        lambda: none.clear(torch.tensor([0])),
        lambda: none.copy(*torch.zeros(2, 1).long()),
    ):
        with pytest.raises(ValueError, match=r"TokenCounts\.\w+: it has no tables \(see TokenCounts.empty\)"):
            call()
    with pytest.raises(
        ValueError, match=r"TokenCounts.clear: slots must be a tensor of int32 or int64 \[n\], got \[0\]"
    ):
        counts.clear([0])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"TokenCounts.copy: target must be a tensor of int32 or int64 \[n\], got torch.f"
    ):
        counts.copy(torch.tensor([1]), torch.tensor([2.0]))
    with pytest.raises(ValueError, match=r"TokenCounts.copy: source and target must be equally many"):
        counts.copy(torch.tensor([1]), torch.tensor([2, 0]))
    for slots, distinct, message in ((2, -3, "distinct must be an int >= 0, got -3"), (1.5, 3, "slots must be an int")):
        with pytest.raises(ValueError, match="TokenCounts.empty: " + message):
            TokenCounts.empty(slots, distinct)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": None}, r"counts must be a TokenCounts"),
        ({"counts": TokenCounts()}, r"counts must be a TokenCounts with tables"),
        ({"counts": TokenCounts(*torch.zeros(2, 2, 6, dtype=torch.int32))}, "a power of two"),
        ({"token_ids": torch.zeros(3, 1, dtype=torch.int64)}, "slots must be given where counts has fewer slots"),
        ({"slots": torch.zeros(1)}, r"slots must be int32, got float32"),
        ({"is_prompt": True, "undo": True}, "undo must be False for a prompt"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    given = {"counts": TokenCounts.empty(2, 4), "token_ids": torch.zeros(1, 1, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=message):
        count_tokens(**given)  # type: ignore[arg-type]
