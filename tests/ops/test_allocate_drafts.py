"""allocate_drafts: no other drafts are worth more, the numbers are those of the definition, whatever the backend."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import DraftAllocation, allocate_drafts
from specdec_kernels.ops.allocate_drafts import op

NAN = float("nan")
NAMES = DraftAllocation._fields


def drafts(batch: int, draft: int, *, seed: int = 1, levels: int = 0) -> tuple[Tensor, Tensor]:
    """Ragged drafts and their confidences, from a few levels that tie or from [0, 1)."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 1000, (batch, draft), generator=g)
    lengths = torch.randint(0, draft + 1, (batch, 1), generator=g)
    confidence = torch.rand(batch, draft, generator=g)
    if levels:
        confidence = torch.randint(0, levels + 1, (batch, draft), generator=g) / levels
    return torch.where(torch.arange(draft) < lengths, ids, -1), confidence


def worth(ids: Tensor, confidence: Tensor, counts: tuple[int, ...]) -> float:
    """Expected accepted drafts if request b keeps its first counts[b]."""
    total = 0.0
    for row, c, count in zip(ids.tolist(), confidence.tolist(), counts, strict=True):
        length = row.index(-1) if -1 in row else len(row)
        total += sum(math.prod(c[: i + 1]) for i in range(min(count, length)))
    return total


def check_layout(found: DraftAllocation, ids: Tensor, budget: int) -> None:
    """Prefixes of each request one after another, then -1."""
    counts, flat = found.num_draft.tolist(), ids.flatten().tolist()
    source = [b * ids.shape[1] + i for b, count in enumerate(counts) for i in range(count)]
    fill = [-1] * (min(budget, ids.numel()) - len(source))
    assert found.cu_draft.tolist() == [sum(counts[:b]) for b in range(len(counts) + 1)]
    assert found.source.tolist() == source + fill
    assert found.draft_ids.tolist() == [flat[i] for i in source] + fill


@pytest.mark.parametrize("budget", [0, 1, 4, 9, 20])  # none; one; some; all that there is room for; more
def test_no_other_allocation_is_worth_more(backend: str, device: str, budget: int) -> None:
    for seed in range(4):
        ids, confidence = drafts(3, 3, seed=seed)
        found = allocate_drafts(ids.to(device), confidence.to(device), budget=budget)
        check_layout(found, ids, budget)
        lengths = (ids >= 0).sum(1).tolist()
        every = itertools.product(*(range(n + 1) for n in lengths))
        best = max(worth(ids, confidence, counts) for counts in every if sum(counts) <= budget)
        assert sum(found.num_draft.tolist()) == min(budget, sum(lengths))
        assert worth(ids, confidence, tuple(found.num_draft.tolist())) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("steps", [False, True])  # each draft costs more than the last; a table with steps
def test_no_other_number_yields_more_tokens_a_unit_of_time(backend: str, device: str, steps: bool) -> None:
    for seed in range(6):
        ids, confidence = drafts(3, 3, seed=seed)
        n = torch.arange(10)
        cost = 1.0 + (0.5 * (n + 3).div(4, rounding_mode="floor") if steps else 0.02 * n * n)
        found = allocate_drafts(
            ids.to(device), confidence.to(device), budget=9, cost=cost.to(device), compare_all=steps
        )  # fmt: skip
        counts = tuple(found.num_draft.tolist())
        every = itertools.product(*(range(k + 1) for k in (ids >= 0).sum(1).tolist()))
        best = max((3 + worth(ids, confidence, c)) / float(cost[sum(c)]) for c in every)
        assert (3 + worth(ids, confidence, counts)) / float(cost[sum(counts)]) == pytest.approx(best, abs=1e-6)
        check_layout(found, ids, 9)


def test_a_draft_that_lowers_the_yield_ends_the_allocation(backend: str, device: str) -> None:
    ids, confidence = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0.9, 0.9], [0.8, 0.9]])
    # 2 / 1, 2.9 / 1.4, 3.71 / 2.4, 4.51 / 2.4, 5.23 / 2.4: behind the step it would be worth it.
    cost = torch.tensor([1.0, 1.4, 2.4, 2.4, 2.4])
    given = [x.to(device) for x in (ids, confidence)]
    assert allocate_drafts(*given, budget=4, cost=cost.to(device)).num_draft.tolist() == [1, 0]
    whole = allocate_drafts(*given, budget=4, cost=cost.to(device), compare_all=True)
    assert whole.num_draft.tolist() == [2, 2]


@pytest.mark.parametrize("compare_all", [False, True])
def test_it_may_decide_not_to_draft(backend: str, device: str, compare_all: bool) -> None:
    ids, confidence = torch.tensor([[1, 2]], device=device), torch.full((1, 2), 0.5, device=device)
    cost = torch.tensor([1.0, 1.5, 2.0], device=device)  # 1 / 1 equals 1.5 / 1.5: the smaller number
    found = allocate_drafts(ids, confidence, budget=2, cost=cost, compare_all=compare_all)
    assert [x.tolist() for x in found] == [[-1, -1], [0, 0], [-1, -1], [0], [0]]


@pytest.mark.parametrize("compare_all", [False, True])
def test_a_cost_that_is_not_positive_is_never_chosen(backend: str, device: str, compare_all: bool) -> None:
    ids, confidence = torch.tensor([[1, 2, 3]], device=device), torch.full((1, 3), 0.9, device=device)
    for bad in (NAN, 0.0, -1.0):
        cost = torch.tensor([2.0, 2.1, bad, 2.2], device=device)
        kept = allocate_drafts(ids, confidence, budget=3, cost=cost, compare_all=compare_all)
        assert kept.num_draft.tolist() == ([3] if compare_all else [1])
        nothing = allocate_drafts(ids, confidence, budget=3, cost=cost * NAN, compare_all=compare_all)
        assert nothing.num_draft.tolist() == [0]


def test_equal_drafts_go_to_the_shallower_then_to_the_lower_request(backend: str, device: str) -> None:
    ids = torch.arange(9).reshape(3, 3).to(device)
    confidence = torch.tensor([[0.5, 1.0, 1.0]] * 3, device=device)
    for budget, counts in ((1, [1, 0, 0]), (3, [1, 1, 1]), (4, [2, 1, 1]), (8, [3, 3, 2])):
        assert allocate_drafts(ids, confidence, budget=budget).num_draft.tolist() == counts


def test_a_draft_ends_where_something_is_wrong_and_no_other_request_sees_it(backend: str, device: str) -> None:
    ids = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, -1, 3], [-1, -1, -1], [-2, 1, 1], [1, 2, 3]])
    rows = [[0.5] * 3, [0.5, NAN, 0.5], [1.5, 0.5, 0.5], [0.5, 0.5, -0.1]]
    rows += [[0.5, NAN, 1], [NAN] * 3, [NAN] * 3, [1, 0, 1]]
    found = allocate_drafts(ids.to(device), torch.tensor(rows, device=device), budget=99)
    assert found.num_draft.tolist() == [3, 1, 0, 2, 1, 0, 0, 1]  # probability 0 is never kept
    assert found.status.tolist() == [0, 2, 2, 2, 0, 0, 4, 0]


def test_requests_that_only_pad_the_batch_count_for_nothing(backend: str, device: str) -> None:
    ids, confidence = torch.tensor([[1, 2], [-3, 4], [5, 6]]), torch.tensor([[0.6, 0.5], [NAN, 1.0], [0.4, 0.5]])
    active = torch.tensor([True, False, True])
    cost = torch.tensor([1.0, 1.25, 1.6, 2.0])
    for kind in (torch.int32, torch.int64):
        found = allocate_drafts(
            ids.to(device, kind), confidence.to(device), budget=3, cost=cost.to(device), active=active.to(device)
        )  # fmt: skip
        assert found.num_draft.tolist() == [1, 0, 0]  # 2 / 1, 2.6 / 1.25, 3 / 1.6; of three requests it would be 3 / 1
        assert found.status.tolist() == [0, 0, 0] and found.draft_ids.dtype == kind


SIZES = [(0, 3), (3, 0), (1, 1), (1, 40), (33, 5), (300, 2)]  # none; no drafts; one; one long; past a warp; a block


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("costs", [None, "rising", "any"])
def test_every_backend_keeps_the_same(backend: str, device: str, size: tuple[int, int], costs: str | None) -> None:
    for levels, share in ((0, 0.4), (3, 0.7), (3, 2.0)):
        ids, confidence = drafts(*size, levels=levels, seed=levels)
        budget = int(share * ids.numel())
        named: dict[str, Any] = {"budget": budget}
        if costs is not None:
            n = torch.arange(budget + 1)
            cost = size[0] + 0.3 * n if costs == "rising" else 1 + torch.rand(budget + 1, generator=torch.Generator())
            named |= {"cost": cost.to(device), "compare_all": costs == "any"}
        want = allocate_drafts(
            ids, confidence, **{**named, **({"cost": cost} if costs else {})}, backend="reference"
        )  # fmt: skip
        found = allocate_drafts(ids.to(device), confidence.to(device), **named)
        for name, have, expected in zip(NAMES, found, want, strict=True):
            assert have.dtype == expected.dtype and have.cpu().tolist() == expected.tolist(), name


def test_results_can_be_given(backend: str, device: str) -> None:
    ids, confidence = (x.to(device) for x in drafts(4, 3))
    want = allocate_drafts(ids, confidence, budget=5)
    out = DraftAllocation(*(torch.full_like(part, 77) for part in want))
    allocate_drafts(ids, confidence, budget=5, out=out)
    assert all(torch.equal(have, part) for have, part in zip(out, want, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_ids": torch.zeros(2, 3)}, "draft_ids must be int32 or int64, got float32"),
        ({"confidence": torch.zeros(2, 4)}, r"confidence must be \[2, 3\], got \[2, 4\]"),
        ({"confidence": torch.zeros(2, 3).double()}, "confidence must be float32"),
        ({"budget": -1}, "budget must be a host int >= 0"),
        ({"budget": True}, "budget must be a host int >= 0, got True"),
        ({"cost": torch.zeros(5)}, r"cost must be \[at least 6\]"),
        ({"compare_all": True}, "compare_all must be False without cost"),
        ({"compare_all": "no"}, "compare_all must be True or False, got 'no'"),
        ({"active": torch.ones(2)}, "active must be bool"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    given = {"draft_ids": torch.zeros(2, 3, dtype=torch.int64), "confidence": torch.zeros(2, 3), "budget": 5, **change}
    with pytest.raises(ValueError, match=message):
        allocate_drafts(**given)  # type: ignore[arg-type]


def test_a_batch_of_a_thousand(backend: str, device: str, is_slow: bool) -> None:
    ids, confidence = drafts(70 if is_slow else 1024, 9 if is_slow else 64, seed=5)
    cost = 1000 + torch.arange(3000.0)
    for budget in (100, 2999):
        given = {"budget": budget, "cost": cost}
        want = allocate_drafts(ids, confidence, **given, backend="reference")
        found = allocate_drafts(ids.to(device), confidence.to(device), budget=budget, cost=cost.to(device))
        assert torch.equal(found.source.cpu(), want.source) and torch.equal(found.cu_draft.cpu(), want.cu_draft)
    assert op.name == "allocate_drafts"
