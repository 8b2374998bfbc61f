"""edit_rows: every row against a loop over its ids, in each layout, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edit_cases import TOGETHER, alone, edited, make_edits
from op_calls import moved

from specdec_kernels import Edits, RowEdits, TokenCounts, edit_rows
from specdec_kernels._edits import unpacked
from specdec_kernels.ops.edit_rows import op  # noqa: F401 - the backends of this file's tests

INF = float("inf")
VOCABS = (41, 64, 300, 4096 + 37)


def same_edits(ours: RowEdits, theirs: RowEdits, logits: torch.Tensor) -> None:
    """Equal rows; every id that differs is listed, and others may be, with the logit that they have."""
    ours = moved(ours, "cpu")
    assert ours.edit_bits is not None and ours.edit_start is not None and theirs.edit_bits is not None
    assert torch.equal(ours.edit_bits & theirs.edit_bits, theirs.edit_bits)
    counts = unpacked(ours.edit_bits, 64 * ours.edit_bits.shape[1]).unflatten(1, (-1, 64)).sum(2)
    assert torch.equal(ours.edit_start.diff(dim=1), counts.int()) and not ours.edit_start[:, 0].any()
    assert ours.edit_values is not None
    for bits, ids in zip(ours.edit_bits, ours.edit_values[3], strict=True):
        named = unpacked(bits[None], logits.shape[-1])[0].nonzero().flatten()
        assert ids[: len(named)].tolist() == named.tolist()
    torch.testing.assert_close(ours.apply(logits), theirs.apply(logits), rtol=0, atol=0, equal_nan=True)


def check(device: str, logits: torch.Tensor, edits: Edits, *args: Any, **named: Any) -> torch.Tensor:
    """Rows as the current backend edits them, held against the reference; float32 [rows, vocab]."""
    rows = logits.reshape(-1, logits.shape[-1])
    ours = edit_rows(*moved((edits, *args), device), vocab=logits.shape[-1], **moved(named, device))
    theirs = edit_rows(edits, *args, vocab=logits.shape[-1], **named, backend="reference")
    same_edits(ours, theirs, rows)
    return theirs.apply(rows)


@pytest.mark.parametrize("vocab", VOCABS)
def test_dense_drafts(backend: str, device: str, vocab: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits, edits = torch.randn(4, 4, vocab, generator=g), make_edits(4, vocab, seed=vocab)
    drafts = torch.randint(-1, vocab, (4, 3), generator=g)
    drafts[1, 1:] = drafts[1, 0]
    rows = check(device, logits, edits, drafts)
    for b in range(4):
        for i in range(4):
            assert rows[4 * b + i].tolist() == edited(logits[b, i], edits, b, drafts[b, :i].tolist())


def test_flat_drafts(backend: str, device: str) -> None:
    g = torch.Generator().manual_seed(2)
    edits, cu = make_edits(3, 70, seed=2), torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    logits, drafts = torch.randn(8, 70, generator=g), torch.randint(0, 70, (5,), generator=g, dtype=torch.int32)
    rows = check(device, logits, edits, drafts, cu_draft=cu, max_draft=3)
    for b in range(3):
        first, last = int(cu[b]), int(cu[b + 1])
        for i in range(last - first + 1):
            place = first + b + i
            assert rows[place].tolist() == edited(logits[place], edits, b, drafts[first : first + i].tolist())


def test_trees(backend: str, device: str) -> None:
    g = torch.Generator().manual_seed(3)
    parents = torch.tensor([[-1, 0, 0, 1, 3, -1], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 2, 2]])
    edits, logits = make_edits(3, 70, seed=3), torch.randn(3, 6, 70, generator=g)
    ids = torch.randint(-1, 70, (3, 6), generator=g)
    rows = check(device, logits, edits, ids, parents=parents).view(3, 6, 70)
    for b in range(3):
        for node in range(6):
            path, n = [], node
            while n > 0:
                path, n = [int(ids[b, n]), *path], int(parents[b, n])
            expected = logits[b, node].tolist() if node and n == -1 else edited(logits[b, node], edits, b, path)
            assert rows[b, node].tolist() == expected


def test_the_row_behind_all_drafts(backend: str, device: str) -> None:
    g = torch.Generator().manual_seed(4)
    edits, logits = make_edits(3, 70, seed=4), torch.randn(3, 70, generator=g)
    drafts = torch.randint(0, 70, (3, 2), generator=g)
    for given in (drafts, None):
        rows = check(device, logits, edits, given, only_last=True)
        for b in range(3):
            assert rows[b].tolist() == edited(logits[b], edits, b, [] if given is None else given[b].tolist())


def test_parts_of_the_vocabulary(backend: str, device: str) -> None:
    g = torch.Generator().manual_seed(5)
    edits, logits = make_edits(2, 200, seed=5), torch.randn(2, 3, 200, generator=g)
    drafts = torch.tensor([[7, 150], [-(2**63), 99]])  # the least number is no token of any part
    whole = check(device, logits, edits, drafts)
    for first, end in ((0, 77), (77, 130), (130, 200)):
        part = check(device, logits[:, :, first:end].contiguous(), edits, drafts, first_id=first)
        assert torch.equal(part, whole[:, first:end])


@pytest.mark.parametrize("field", Edits._fields)
def test_each_edit_alone(backend: str, device: str, field: str) -> None:
    every = make_edits(3, 50, seed=6)
    edits = alone(every, field)
    g = torch.Generator().manual_seed(6)
    logits, drafts = torch.randn(3, 4, 50, generator=g), torch.randint(0, 50, (3, 3), generator=g)
    rows = check(device, logits, edits, drafts)
    for b in range(3):
        for i in range(4):
            assert rows[4 * b + i].tolist() == edited(logits[b, i], edits, b, drafts[b, :i].tolist())
    assert torch.equal(rows, logits.flatten(0, 1)) != (field in TOGETHER)


def test_a_request_that_is_not_active_has_no_edits(backend: str, device: str) -> None:
    edits, logits = make_edits(3, 50, seed=7), torch.randn(9, 50)
    active = torch.tensor([True, False, True])
    rows = check(device, logits, edits, torch.zeros(3, 2, dtype=torch.int64), active=active)
    assert [not torch.equal(*pair) for pair in zip(rows, logits, strict=True)] == [True] * 3 + [False] * 3 + [True] * 3


def test_a_number_without_a_slot_has_no_text(backend: str, device: str) -> None:
    edits, logits = make_edits(4, 64, seed=5), torch.randn(4, 64)
    slots = torch.tensor([2, -1, 99, 2**31 - 1], dtype=torch.int32)
    rows = check(device, logits, edits._replace(slots=slots))
    empty = edits._replace(counts=TokenCounts.empty(4, 8))
    without = edit_rows(empty, vocab=64, backend="reference").apply(logits)
    assert torch.equal(rows[1:], without[1:])
    assert torch.equal(check(device, logits, edits._replace(slots=slots, counts=TokenCounts.empty(0, 8))), without)


def test_a_ban_holds_whatever_the_logit(backend: str, device: str) -> None:
    edits = Edits(
        bias_ids=torch.tensor([[2, 4]], dtype=torch.int32), bias=torch.tensor([[-INF, -INF]]),
        repetition=torch.tensor([-1.0]), stop_ids=torch.tensor([[3]], dtype=torch.int32),
        min_tokens=torch.tensor([1], dtype=torch.int32),
    )  # fmt: skip
    logits = torch.tensor([[0.0, 1.0, float("nan"), INF, -2.0]])
    rows = check(device, logits, edits, torch.empty(1, 0, dtype=torch.int64))
    assert rows.tolist() == [[0.0, 1.0, -INF, -INF, -INF]]


def test_a_malformed_layout_edits_first_rows_at_most(backend: str, device: str) -> None:
    g = torch.Generator().manual_seed(8)
    edits, logits = make_edits(3, 50, seed=8), torch.randn(8, 50, generator=g)
    for offsets in ([0, 9, 3, 5], [1, 2, 3, 5], [0, -1, 3, 5], [0, 2, 4, 4], [0, 2, 0, 2]):
        cu = torch.tensor(offsets, dtype=torch.int32)
        check(device, logits, edits, torch.arange(5), cu_draft=cu, max_draft=2)


def test_a_penalty_that_is_nan_reaches_the_row(backend: str, device: str) -> None:
    edits = Edits(frequency=torch.tensor([float("nan")]))
    rows = edit_rows(*moved((edits, torch.tensor([[3]])), device), vocab=8)
    assert rows.apply(torch.zeros(2, 8, device=device)).isnan().nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edits": None}, "edits must be an Edits"),
        ({"bias": None}, "edits.bias must be given: bias_ids and bias go together"),
        ({"bias": torch.zeros(2, 1)}, r"edits.bias must be \[2, 6\]"),
        ({"min_tokens": None}, "edits.min_tokens must be given"),
        ({"repetition": torch.ones(3)}, r"edits.repetition must be \[2\], got \[3\]"),
        ({"tail": None}, r"edits.tail must be \[batch, 2\] or more"),
        ({"tail": torch.zeros(2, 1, dtype=torch.int32)}, r"edits.tail must be \[batch, 2\] or more"),
        ({"counts": (1, 2)}, "edits.counts must be a TokenCounts"),
        ({"counts": TokenCounts.empty(1, 4), "slots": None}, "edits.slots must be given where counts has fewer slots"),
        ({"vocab": 0}, "vocab must be a host int >= 1"),
        ({"vocab": 2**23}, "vocab must be less than 8388608"),
        ({"only_last": True, "parents": torch.tensor([[-1], [-1]])}, "draft_ids must be given with parents"),
        ({"draft_ids": [[1]]}, "draft_ids must be a tensor"),
        ({"active": torch.ones(2)}, "active must be bool"),
        ({"first_id": -1}, "first_id must be a host int >= 0"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    own = {name: change[name] for name in change if name in Edits._fields}
    given = {"vocab": 50, "edits": make_edits(2, 50)._replace(**own)}
    given |= {name: change[name] for name in change if name not in own}
    with pytest.raises(ValueError, match=message):
        edit_rows(**given)
