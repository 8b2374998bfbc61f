"""rollback: lengths, freed pages, tables and zeros against a walk over each request, in poisoned memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from caches import FORMATS, Cache, assert_bits, counts, make_cache
from check import assert_same
from optional_hypothesis import HealthCheck, given, settings, st
from torch import Tensor

from specdec_kernels import CacheLayout, RollbackResult, rollback
from specdec_kernels.ops.rollback import op

NAMES = RollbackResult._fields


def walked(
    cache: Cache, lengths: list[int], accepted: list[int], tail: int, *, zero: bool, columns: int
) -> tuple[list[int], list[int], list[list[int]], list[Tensor]]:
    """(lengths, freed pages, table, bits) of good requests, one slot after the other."""
    twin = cache.twin()
    table = [[0]] * len(lengths) if twin.block_table is None else twin.block_table.tolist()
    freed = []
    new = [n if a < 0 else n + 1 + a for n, a in zip(lengths, accepted, strict=True)]
    for b, first in enumerate(new):
        for position in range(first, min(first + tail, columns * cache.page_size)):
            if accepted[b] < 0 or table[b][position // cache.page_size] < 0:
                break
            for tensor in twin.tensors if zero else []:
                twin.row(tensor, b, position).zero_()
        if twin.block_table is None or accepted[b] < 0:
            continue
        for i in range(-(-first // cache.page_size), columns):
            if i * cache.page_size >= first + tail or table[b][i] < 0:
                break
            freed.append(table[b][i])
            table[b][i] = -1
    return new, freed, table, twin.buffers


def compare(
    cache: Cache, lengths: list[int], accepted: list[int], *, max_tail: int | None = None, zero_tail: bool = False,
    dtype: torch.dtype = torch.int64,
) -> RollbackResult:  # fmt: skip
    layout, device = cache.layout(), str(cache.tensors[0].device)
    columns = layout.capacity // layout.page_size
    tail = layout.capacity if max_tail is None else max_tail
    new, freed, table, bits = walked(cache, lengths, accepted, tail, zero=zero_tail, columns=columns)
    start = torch.tensor(lengths, dtype=dtype, device=device)
    result = rollback(layout, start, counts(accepted, device), max_tail=max_tail, zero_tail=zero_tail)
    assert result.lengths.tolist() == new and result.lengths.dtype == dtype
    assert result.num_freed.tolist() == [len(freed)] and result.status.tolist() == [0] * len(lengths)
    assert result.freed_pages.tolist() == freed + [-1] * (len(result.freed_pages) - len(freed))
    if cache.block_table is not None:
        assert cache.block_table.tolist() == table
        assert result.freed_pages.dtype == cache.block_table.dtype
    assert_bits(cache, bits)
    return result


def test_pages_behind_the_new_length_are_freed(backend: str, device: str) -> None:
    table = torch.tensor([[5, 2, 7, -1], [0, 1, 3, 4], [6, -1, -1, -1]], dtype=torch.int32, device=device)
    layout = CacheLayout([torch.zeros(9, 4, 2, device=device)], "nhd", table)
    lengths, accepted = torch.tensor([3, 6, 1], device=device), counts([0, 2, 1], device)
    result = rollback(layout, lengths, accepted)
    assert result.lengths.tolist() == [4, 9, 3]
    assert result.freed_pages.tolist() == [2, 7, 4] + [-1] * 9
    assert result.num_freed.tolist() == [3] and result.status.tolist() == [0, 0, 0]
    assert table.tolist() == [[5, -1, -1, -1], [0, 1, 3, -1], [6, -1, -1, -1]]
    again = rollback(layout, result.lengths - 1, counts([0, 0, 0], device))  # nothing is freed twice
    assert again.num_freed.tolist() == [0] and set(again.freed_pages.tolist()) == {-1}


@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_every_layout(backend: str, device: str, format: str, zero_tail: bool) -> None:
    for max_tail in (None, 0, 1, 5, 1000):
        cache = make_cache(format, batch=4, scales=True, device=device)
        compare(cache, [0, 3, 16, 7], [3, 0, 7, -1], max_tail=max_tail, zero_tail=zero_tail)


def test_a_large_batch_frees_in_order(backend: str, device: str) -> None:
    batch = 300  # more requests than a block has threads
    cache = make_cache("nhd", batch=batch, capacity=12, page_size=2, heads=(1,), dims=(1,), device=device)
    rng = random.Random(0)
    compare(cache, [rng.randrange(8) for _ in range(batch)], [rng.randrange(-1, 4) for _ in range(batch)], max_tail=6)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    format=st.sampled_from(FORMATS), batch=st.integers(0, 4), page_size=st.integers(1, 9), blocks=st.integers(1, 5),
    max_tail=st.none() | st.integers(0, 30), zero_tail=st.booleans(), wide=st.booleans(), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_every_shape(backend: str, device: str, is_slow: bool, **shape: Any) -> None:
    rng = random.Random(shape["seed"])
    batch = min(shape["batch"], 2) if is_slow else shape["batch"]
    cache = make_cache(
        shape["format"], batch=batch, capacity=shape["page_size"] * shape["blocks"], page_size=shape["page_size"],
        heads=(2, 1), dims=(3, 8), table_dtype=torch.int64 if shape["wide"] else torch.int32, device=device,
    )  # fmt: skip
    capacity = cache.layout().capacity
    new = [rng.randrange(1, capacity + 1) for _ in range(batch)]
    accepted = [rng.randrange(-1, n) for n in new]
    if cache.block_table is not None:
        for b, n in enumerate(new):  # tables end somewhere behind the new length
            cache.block_table[b, rng.randrange(-(-n // cache.page_size), cache.block_table.shape[1] + 1) :] = -1
    lengths = [n - 1 - a if a >= 0 else n for n, a in zip(new, accepted, strict=True)]
    compare(
        cache, lengths, accepted, max_tail=shape["max_tail"], zero_tail=shape["zero_tail"],
        dtype=torch.int32 if shape["wide"] else torch.int64,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("length", "accepted", "entry"),
    [(-1, 0, 0), (5, -2, 0), (20, 4, 0), (2**62, 1, 0), (2**63 - 1, 1, 0), (5, 1, 20), (5, 1, 2**31 - 1)],
)
def test_bad_requests_are_flagged_and_left_alone(
    backend: str, device: str, length: int, accepted: int, entry: int
) -> None:
    cache = make_cache("nhd", device=device)  # 20 pages of 4, 6 of them a request
    table = cache.block_table
    assert table is not None
    if entry:
        table[1, 3] = entry
    other = cache.twin()
    assert other.block_table is not None
    _, freed, want, bits = walked(other, [3, 5, 9], [1, -1, 0], 24, zero=True, columns=6)
    lengths = torch.tensor([3, length, 9], device=device)
    result = rollback(cache.layout(), lengths, counts([1, accepted, 0], device), zero_tail=True)
    assert result.status.tolist() == [0, 32, 0] and result.lengths.tolist() == [5, length, 10]
    assert table.tolist() == want and result.freed_pages.tolist()[: len(freed)] == freed
    assert result.num_freed.tolist() == [len(freed)]
    assert_bits(cache, bits)


def test_out_receives_the_results(backend: str, device: str) -> None:
    first, second = (make_cache("slots", device=device) for _ in range(2))
    second.block_table = first.block_table.clone()  # type: ignore[union-attr]
    lengths, accepted = torch.tensor([3, 0, 9], device=device), counts([1, 0, -1], device)
    want = rollback(first.layout(), lengths, accepted, max_tail=7)
    assert len(want.freed_pages) == 3 * 7
    out = RollbackResult(*(torch.full_like(t, 99) for t in want))
    got = rollback(second.layout(), lengths, accepted, max_tail=7, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(tuple(got), tuple(want), NAMES)


def test_opcheck_and_compile(backend: str, device: str) -> None:
    torch.compiler.reset()  # each backend compiles the lambda below four times; Dynamo's limit is eight
    lengths, accepted = torch.tensor([3, 0, 9], device=device), counts([1, 0, -1], device)
    for format in ("nhd", "bhld"):
        for zero_tail in (False, True):
            cache = make_cache(format, device=device)
            _, freed, table, bits = walked(cache, [3, 0, 9], [1, 0, -1], 6, zero=zero_tail, columns=6)
            layout = cache.layout()
            if backend == "reference":
                continue
            tensors = [t.clone() for t in layout.tensors] if zero_tail else []
            entries = None if layout.block_table is None else layout.block_table.clone()
            given = (tensors, layout.table, entries, layout.page_size, layout.num_pages, lengths, accepted, 6)
            torch.library.opcheck(op.overload(backend), given)
            outs = tuple(t.clone() for t in op.overload(backend)(*given))
            torch.library.opcheck(op.overload(backend, out=True), (*given, *outs))
            step = torch.compile(
                lambda n, a: rollback(layout, n, a, max_tail=6, zero_tail=zero_tail),  # noqa: B023
                fullgraph=True, backend="aot_eager",
            )  # fmt: skip
            result = step(lengths, accepted)
            assert result.lengths.tolist() == [5, 1, 9] and result.num_freed.tolist() == [len(freed)]
            assert cache.block_table is None or cache.block_table.tolist() == table
            assert_bits(cache, bits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": None}, "layout must be a CacheLayout, got NoneType"),
        ({"lengths": torch.zeros(2)}, "lengths must be int32 or int64, got float32"),
        ({"lengths": torch.zeros(4).long()[::2]}, r"lengths must be dense \(call .contiguous\(\)\), got stride 2"),
        ({"num_accepted": torch.zeros(3).int()}, r"num_accepted must be \[2\], got \[3\]"),
        ({"max_tail": -1}, "max_tail must be a host int >= 0 or None, got -1"),
        ({"max_tail": 2.0}, "max_tail must be a host int >= 0 or None, got 2.0"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    layout = CacheLayout([torch.zeros(2, 1, 9, 4)], "bhld")
    arguments = {"layout": layout, "lengths": torch.zeros(2).long(), "num_accepted": counts([0, 0]), **change}
    with pytest.raises(ValueError, match="rollback: " + message):
        rollback(**arguments)
