"""compact_cache: every byte against rows copied one by one, in poisoned memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from caches import FORMATS, Cache, assert_bits, compacted, counts, leaf_paths, make_cache, padded, random_tree
from optional_hypothesis import HealthCheck, given, settings, st
from torch import Tensor

from bench.meters import host_meter
from specdec_kernels import CacheLayout, compact_cache, use_backend
from specdec_kernels.ops.compact_cache import op


def run(
    cache: Cache, path: list[list[int]], lengths: list[int], *, columns: int | None = None,
    dtype: torch.dtype = torch.int64, **keywords: Any,
) -> Tensor:  # fmt: skip
    """compact_cache of whole paths."""
    device = str(cache.tensors[0].device)
    width = max(map(len, path), default=0) + 1 if columns is None else columns
    accepted = counts([len(nodes) for nodes in path], device)
    start = torch.tensor(lengths, dtype=dtype, device=device)
    return compact_cache(cache.layout(), padded(path, width, dtype, device), accepted, start, **keywords)


def compare(cache: Cache, path: list[list[int]], lengths: list[int], **keywords: Any) -> None:
    want = compacted(cache, path, lengths)
    status = run(cache, path, lengths, **keywords)
    assert status.tolist() == [0] * len(path)
    assert_bits(cache, want)


# --- examples one can check by hand


def test_the_path_0_2_3_reads_slot_2_before_it_writes_it(backend: str, device: str) -> None:
    keys = torch.tensor([7, 0, 1, 2, 3], device=device).view(1, 1, 5, 1)
    path, one = torch.tensor([[2, 3, -1]], device=device), counts([1], device)
    assert compact_cache(CacheLayout([keys], "bhld"), path, 2 * one, one).tolist() == [0]
    assert keys.flatten().tolist() == [7, 0, 2, 3, 3]


def test_a_chain_moves_nothing_and_looks_nothing_up(backend: str, device: str) -> None:
    cache = make_cache("nhd", batch=2, device=device)
    cache.block_table[:] = -1  # type: ignore[index]
    want = cache.bits()
    assert run(cache, [[1, 2, 3], []], [2, 5]).tolist() == [0, 0]
    assert_bits(cache, want)


def test_a_prefix_in_place_is_not_looked_up_and_the_rest_moves(backend: str, device: str) -> None:
    cache = make_cache("slots", batch=1, device=device)
    want = compacted(cache, [[1, 2, 5, 9]], [3])
    cache.block_table[0, :6] = -1  # type: ignore[index]
    assert run(cache, [[1, 2, 5, 9]], [3]).tolist() == [0]
    assert_bits(cache, want)


# --- every layout


@pytest.mark.parametrize("format", FORMATS)
def test_every_leaf_of_random_trees(backend: str, device: str, is_slow: bool, format: str) -> None:
    rng = random.Random(format)
    for nodes in (2, 6, 12):
        paths = leaf_paths(random_tree(nodes, rng))
        rng.shuffle(paths)
        for i in range(0, min(len(paths), 3 if is_slow else 99), 3):
            batch = paths[i : i + 3]
            cache = make_cache(format, batch=len(batch), page_size=4, device=device)
            compare(
                cache,
                batch,
                [rng.randrange(24 - nodes + 1) for _ in batch],
                dtype=rng.choice([torch.int32, torch.int64]),
            )


@pytest.mark.parametrize("page_size", [1, 2, 16, 256])  # a slot; a path over many borders; usual; larger than the step
@pytest.mark.parametrize("format", ["nhd", "hnd"])
def test_paths_cross_page_borders(backend: str, device: str, format: str, page_size: int) -> None:
    cache = make_cache(format, batch=2, capacity=260, page_size=page_size, heads=(2,), dims=(4,), device=device)
    compare(cache, [[2, 3, 7, 8, 30], [1, 4]], [250 - 31, 253])


@pytest.mark.parametrize("format", FORMATS)
def test_long_paths_whose_moves_all_overlap(backend: str, device: str, format: str) -> None:
    cache = make_cache(format, batch=2, capacity=150, page_size=16, heads=(2,), dims=(3,), device=device)
    compare(cache, [list(range(2, 140)), list(range(5, 100, 3))], [1, 7])


DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["bhld", "nhd"])
def test_any_element_with_its_scale_planes(backend: str, device: str, format: str, dtype: torch.dtype) -> None:
    cache = make_cache(format, dtype=dtype, heads=(3, 1), dims=(16, 24), scales=True, device=device)
    compare(cache, [[2, 4], [1, 3], [5]], [0, 3, 11])


@pytest.mark.parametrize("offset", [0, 8, 4, 2])  # where the tensors start, off 16 bytes
def test_rows_of_any_alignment(backend: str, device: str, offset: int) -> None:
    compare(make_cache("nhd", offset=offset, device=device), [[2, 4], [1, 3], [5]], [0, 3, 11])
    compare(make_cache("bhld", offset=offset, dims=(7, 1, 9), device=device), [[2, 4], [1, 3], [5]], [0, 3, 11])


def test_latent_rows_and_tensors_of_different_length(backend: str, device: str) -> None:
    cache = Cache("blhd", 20)
    cache.add((2, 20, 576), torch.bfloat16, device)
    cache.add((2, 33, 64), torch.float16, device)
    compare(cache, [[3, 5], [2]], [4, 15])


def test_stacked_and_interleaved_pools(backend: str, device: str) -> None:
    """[layer, 2, page, slot, head, dim], and [page, 2, slot, head, dim] whose keys and values take turns."""
    path, one = torch.tensor([[2, 4, -1], [3, -1, -1]], device=device), counts([2, 1], device)
    lengths = torch.tensor([0, 5], device=device)
    table = torch.tensor([[3, 0, -1], [1, 4, 2]], device=device, dtype=torch.int32)
    stacked = torch.randn(2, 2, 5, 4, 2, 8).to(device)
    taking_turns = stacked[0].transpose(0, 1).contiguous()
    one_by_one = [t.clone() for t in stacked.flatten(0, 1)]
    status = compact_cache(CacheLayout(one_by_one, "nhd", table), path, one, lengths)
    assert status.tolist() == [0, 0]
    compact_cache(CacheLayout(stacked.flatten(0, 1), "nhd", table), path, one, lengths)
    assert torch.equal(stacked.flatten(0, 1), torch.stack(one_by_one))
    compact_cache(CacheLayout(taking_turns.unbind(1), "nhd", table), path, one, lengths)
    assert torch.equal(taking_turns.transpose(0, 1), stacked[0])


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    format=st.sampled_from(FORMATS), batch=st.integers(0, 4), page_size=st.integers(1, 9), nodes=st.integers(1, 20),
    heads=st.lists(st.integers(1, 3), min_size=1, max_size=3), dim=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES), wide=st.booleans(), scales=st.booleans(), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_every_shape(backend: str, device: str, is_slow: bool, **shape: Any) -> None:
    rng = random.Random(shape["seed"])
    batch = min(shape["batch"], 2) if is_slow else shape["batch"]
    nodes, heads = shape["nodes"], tuple(shape["heads"])
    cache = make_cache(
        shape["format"], batch=batch, capacity=nodes + 9, page_size=shape["page_size"], heads=heads,
        dims=(shape["dim"],) * len(heads), dtype=shape["dtype"], scales=shape["scales"], device=device,
        table_dtype=torch.int64 if shape["wide"] else torch.int32,
    )  # fmt: skip
    path = [sorted(rng.sample(range(1, nodes), rng.randrange(nodes))) for _ in range(batch)]
    compare(
        cache,
        path,
        [rng.randrange(10) for _ in path],
        columns=nodes,
        dtype=torch.int32 if shape["wide"] else torch.int64,
    )


# --- bad input, and what must stay as it is


def test_bad_paths_are_flagged_and_harm_nobody(backend: str, device: str) -> None:
    good = [2, 4]
    for bad in ([3, 2], [2, 2], [0, 1], [-5, 3], [2, 99], [1, -1], [2, 2**31 - 1], [2, 2, 3], [1, 1, 3], [-1, 2, 3]):
        cache = make_cache("nhd", device=device)
        want = compacted(cache, [good, [], good], [3, 0, 8])
        assert run(cache, [good, bad, good], [3, 5, 8], dtype=torch.int32).tolist() == [0, 32, 0], bad
        assert_bits(cache, want)


@pytest.mark.parametrize("format", ["bhld", "nhd"])
def test_bad_numbers_are_flagged_and_harm_nobody(backend: str, device: str, format: str) -> None:
    for accepted, length, status in (
        (4, 3, 32), (-2, 3, 32), (2, -1, 32), (2, 10**6, 32), (2, 2**62, 32), (-1, -9, 0), (0, 3, 0),
    ):  # fmt: skip
        cache = make_cache(format, device=device)
        want = compacted(cache, [[2, 4], [], [1, 3]], [3, 0, 8])
        path = padded([[2, 4], [2, 4], [1, 3]], 3, device=device)
        lengths = torch.tensor([3, length, 8], device=device)
        result = compact_cache(cache.layout(), path, counts([2, accepted, 2], device), lengths)
        assert result.tolist() == [0, status, 0], (accepted, length)
        assert_bits(cache, want)


@pytest.mark.parametrize("entry", [-1, -7, 20, 2**31 - 1])  # no page; nonsense; one past the pool; far past it
@pytest.mark.parametrize("block", [1, 2])  # where a row is written; where one is read
def test_bad_tables_are_flagged_and_harm_nobody(backend: str, device: str, entry: int, block: int) -> None:
    cache = make_cache("nhd", device=device)  # 20 pages of 4
    cache.block_table[1, block] = entry  # type: ignore[index]
    want = compacted(cache, [[2, 4], [], [1, 3]], [3, 0, 8])
    assert run(cache, [[2, 4], [3, 5], [1, 3]], [3, 5, 8]).tolist() == [0, 32, 0]
    assert_bits(cache, want)


def test_shared_prefix_pages_are_never_written(backend: str, device: str) -> None:
    cache = make_cache("nhd", batch=2, device=device)
    assert cache.block_table is not None
    cache.block_table[1, :2] = cache.block_table[0, :2]  # 8 tokens in common; both roots lie behind them
    shared = [[cache.row(t, 0, p).cpu().view(torch.uint8).clone() for p in range(8)] for t in cache.tensors]
    compare(cache, [[2, 4, 9], [3, 4]], [8, 9])
    for tensor, rows in zip(cache.tensors, shared, strict=True):
        assert all(torch.equal(cache.row(tensor, 1, p).cpu().view(torch.uint8), row) for p, row in enumerate(rows))


def test_only_what_must_move_is_moved(cuda_host: None) -> None:
    """Bytes through global memory, tables and paths included, beside the rows that change their place."""
    cache = make_cache("bhld", batch=4, capacity=40, heads=(8,) * 16, dims=(128,) * 16)
    path = [[1, 2, 9, 11], [4], [1, 2, 3], [2, 3, 7, 20, 21]]
    moving = sum(n != d for nodes in path for d, n in enumerate(nodes, 1))
    with use_backend("cuda_host"), host_meter() as moved:
        assert run(cache, path, [3, 0, 5, 9]).tolist() == [0] * 4
    assert 1 <= moved.total / (2 * moving * 16 * 8 * 128 * 2) <= 1.01


# --- the calling conventions


def test_out_receives_the_status_and_other_tables_are_cheap(backend: str, device: str) -> None:
    cache = make_cache("hnd", device=device)
    layout, out = cache.layout(), counts([9, 9, 9], device)
    path, accepted, lengths = padded([[2]] * 3, 2, device=device), counts([1] * 3, device), counts([0, 3, 8], device)
    assert cache.block_table is not None
    want = compacted(cache, [[2]] * 3, [0, 3, 8])
    for b in range(3):  # request by request, each under its own table
        part = layout.with_block_table(cache.block_table[b : b + 1])
        compact_cache(part, path[b : b + 1], accepted[b : b + 1], lengths[b : b + 1], out=out[b : b + 1])
    assert out.tolist() == [0, 0, 0]
    assert_bits(cache, want)
    with pytest.raises(ValueError, match=r"compact_cache: out.status must be torch.int32 \[3\], got torch.int64 \[3\]"):
        compact_cache(layout, path, accepted, lengths, out=out.long())


def test_opcheck_and_compile(backend: str, device: str) -> None:
    """The cache that a compiled graph leaves behind is the right one, also where it is functionalised."""
    torch.compiler.reset()  # the lambda below is compiled for every layout and backend; Dynamo's limit is eight
    path, accepted, lengths = padded([[2, 4], [3]], 3, device=device), counts([2, 1], device), counts([1, 5], device)
    for format in ("bhld", "nhd"):
        cache = make_cache(format, batch=2, device=device)
        want = compacted(cache, [[2, 4], [3]], [1, 5])
        layout = cache.layout()
        if backend != "reference":
            arguments = (layout.tensors, layout.table, layout.block_table, layout.page_size, layout.num_pages)
            given = (
                *([t.clone() for t in a] if isinstance(a, list) else a for a in arguments),
                path,
                accepted,
                lengths,
            )
            torch.library.opcheck(op.overload(backend), given)
            torch.library.opcheck(op.overload(backend, out=True), (*given, torch.empty_like(accepted)))
            step = torch.compile(lambda p, a, n: compact_cache(layout, p, a, n), fullgraph=True, backend="aot_eager")  # noqa: B023
            assert step(path, accepted, lengths).tolist() == [0, 0]
            assert_bits(cache, want)


def _layout(**change: Any) -> CacheLayout:
    arguments: dict[str, Any] = {"tensors": [torch.zeros(2, 1, 9, 4)], "format": "bhld", "block_table": None, **change}
    return CacheLayout(arguments["tensors"], arguments["format"], arguments["block_table"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nld"}, "format must be one of 'bhld', 'blhd', 'hnd', 'nhd', 'slots', got 'nld'"),
        ({"format": ["bhld"]}, r"format must be one of 'bhld', .*, got \['bhld'\]"),
        ({"tensors": []}, "tensors must be at least one tensor, got none"),
        ({"tensors": None}, "tensors must be a sequence of tensors, or one stacked tensor, got NoneType"),
        ({"tensors": torch.tensor(0.0)}, "tensors must be a sequence of tensors, or one stacked tensor, got Tensor"),
        ({"tensors": [None]}, r"tensors\[0\] must be a tensor, got NoneType"),
        ({"tensors": [torch.zeros(2, 9)]}, r"tensors\[0\] must be of at least 3 axes for format 'bhld', got \[2, 9\]"),
        ({"tensors": [torch.zeros(2, 1, 9, 4), torch.zeros(3, 1, 9, 4)]}, r"tensors\[1\] must be of batch 2, got 3"),
        (
            {"tensors": [torch.zeros(2, 1, 1, 4).expand(2, 1, 9, 4)]},
            r"tensors\[0\] must be of rows with memory of",
        ),
        (
            {"tensors": [torch.zeros(2, 1, 30).unfold(2, 8, 2)]},
            r"tensors\[0\] must be of rows .*, neither expanded nor overlapping, got strides \[30, 2, 30, 1\]",
        ),
        ({"tensors": [torch.zeros(2, 3, 9, 8)[..., ::2]]}, r"tensors\[0\] must be of dense rows"),
        ({"tensors": [torch.zeros(2, 1, 0, 4)]}, "tensors must be of at least one slot"),
        ({"block_table": torch.zeros(2, 1)}, "block_table must be None for format 'bhld', got Tensor"),
        (
            {"format": "nhd", "block_table": [[0, 1]]},
            r"block_table must be a tensor \[batch, pages\] for format 'nhd', got list",
        ),
        ({"format": "nhd"}, r"block_table must be a tensor \[batch, pages\] for format 'nhd', got NoneType"),
        (
            {"format": "nhd", "block_table": torch.zeros(2, 3)},
            r"block_table must be int32 or int64 \[batch, pages\], got float32 \[2, 3\]",
        ),
        (
            {"format": "nhd", "tensors": [torch.zeros(5, 4, 1), torch.zeros(5, 8, 1)]},
            r"tensors\[1\] must be of page size 4, got 8",
        ),
        (
            {"format": "nhd", "block_table": torch.zeros(3, 2, dtype=torch.int32).t()},
            "block_table must be dense in its last dimension, got stride 2",
        ),
    ],
)
def test_a_wrong_layout_says_what_to_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="CacheLayout: " + message):
        _layout(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": 3}, "layout must be a CacheLayout, got int"),
        ({"path": torch.zeros(2, 3)}, "path must be int32 or int64, got float32"),
        ({"path": torch.zeros(3, 3).long()}, r"path must be \[2, n\], got \[3, 3\]"),
        ({"path": torch.zeros(3, 2).long().t()}, r"path must be contiguous \(call .contiguous\(\)\), got strides"),
        ({"num_accepted": torch.zeros(2).long()}, "num_accepted must be int32, got int64"),
        ({"num_accepted": None}, "num_accepted must be a tensor of int32, got NoneType"),
        ({"lengths": torch.zeros(2)}, "lengths must be int32 or int64, got float32"),
        ({"lengths": torch.zeros(3).long()}, r"lengths must be \[2\], got \[3\]"),
        ({"backend": "numpy"}, "backend must be one of reference, cpu, "),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    arguments = {
        "layout": _layout(), "path": torch.zeros(2, 3).long(), "num_accepted": counts([0, 0]),
        "lengths": torch.zeros(2).long(), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match="compact_cache: " + message):
        compact_cache(**arguments)


def test_a_layout_brings_the_table_of_its_addresses() -> None:
    """Other tensors than the layout's, which torch.compile may hand over, get a table of their own."""
    triton_cache = pytest.importorskip("specdec_kernels._triton.cache")
    layout = CacheLayout([torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 6)], "bhld")
    views, _ = triton_cache.views(layout.tensors, layout.table, 2)
    assert views.address.tolist() == [t.data_ptr() for t in layout.tensors]
    assert views.address.untyped_storage().data_ptr() == layout.table.untyped_storage().data_ptr()
    copies = [t.clone() for t in layout.tensors]
    views, _ = triton_cache.views(copies, layout.table, 2)
    assert views.address.tolist() == [t.data_ptr() for t in copies]
