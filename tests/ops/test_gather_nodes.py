"""gather_nodes: the rows of the path, beside plain indexing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from caches import leaf_paths, padded, random_tree
from check import assert_same

from specdec_kernels import GatherResult, gather_nodes
from specdec_kernels.ops.gather_nodes import op


def test_the_root_then_the_path_then_zeros(backend: str, device: str) -> None:
    features = torch.tensor([[10.0, 11.0, 12.0, 13.0], [20.0, 21.0, 22.0, 23.0]], device=device)[..., None]
    result = gather_nodes(features, torch.tensor([[2, 3, -1, -1], [-1, 3, 3, -1]], device=device))
    assert result.values[..., 0].tolist() == [[10, 12, 13, 0], [20, 0, 0, 0]]
    assert result.status.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("row", [(), (3,), (2, 4096)])  # a scalar a node; odd; three layers' features
def test_every_leaf_of_a_random_tree(backend: str, device: str, dtype: torch.dtype, row: tuple[int, ...]) -> None:
    paths = leaf_paths(random_tree(9, random.Random(str(row))))
    columns = max(map(len, paths)) + 1
    storage = torch.randint(0, 255, (len(paths), 12, *row, dtype.itemsize), dtype=torch.uint8)
    values = storage.view(dtype)[..., 0].to(device)[:, :9]
    path = padded(paths, columns, random.choice([torch.int32, torch.int64]), device)
    result = gather_nodes(values, path)
    assert result.values.dtype == dtype and result.values.shape == (len(paths), columns, *row)
    for b, nodes in enumerate(paths):
        want = torch.zeros(columns, *row, dtype=dtype)
        want[: len(nodes) + 1] = values.cpu()[b, [0, *nodes]]
        assert torch.equal(result.values[b].cpu().view(torch.uint8), want.view(torch.uint8))
    assert result.status.tolist() == [0] * len(paths)


def test_nodes_that_do_not_exist_end_the_path(backend: str, device: str) -> None:
    features = torch.arange(1.0, 9.0, device=device).view(2, 4, 1)
    for node in (4, -2, 2**31 - 1):
        path = torch.tensor([[2, node, 3, -1], [1, 2, 3, -1]], dtype=torch.int32, device=device)
        result = gather_nodes(features, path)
        assert result.values[..., 0].tolist() == [[1, 3, 0, 0], [5, 6, 7, 8]]
        assert result.status.tolist() == [32, 0]


def test_out_opcheck_and_compile(backend: str, device: str) -> None:
    values = torch.randn(3, 6, 2, 5).bfloat16().to(device)
    path = padded([[2, 4], [], [5]], 4, device=device)
    want = gather_nodes(values, path)
    out = GatherResult(torch.full_like(want.values, 7), torch.full_like(want.status, 7))
    assert gather_nodes(values, path, out=out) is out
    assert_same(tuple(out), tuple(want), GatherResult._fields)
    assert gather_nodes(values[:0], path[:0]).values.shape == (0, 4, 2, 5)
    if backend != "reference":
        rows = values.view(torch.uint8).flatten(2)
        torch.library.opcheck(op.overload(backend), (rows, path))
        outs = torch.empty(3, 4, 20, dtype=torch.uint8, device=device), torch.empty_like(want.status)
        torch.library.opcheck(op.overload(backend, out=True), (rows, path, *outs))
        step = torch.compile(gather_nodes, fullgraph=True, backend="aot_eager")
        assert_same(tuple(step(values, path)), tuple(want), GatherResult._fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": None}, r"values must be a tensor \[batch, nodes, ...\], got NoneType"),
        ({"values": torch.zeros(2)}, r"values must be \[batch, nodes, ...\] with a root .*, got \[2\]"),
        ({"values": torch.zeros(2, 0, 3)}, r"values must be \[batch, nodes, ...\] with a root .*, got \[2, 0, 3\]"),
        ({"values": torch.zeros(2, 4, 0)}, r"values must be .* with a root and no empty rows, got \[2, 4, 0\]"),
        ({"values": torch.zeros(2, 4, 6)[..., ::2]}, "values must be dense but for its first two axes"),
        ({"path": torch.zeros(2, 3)}, "path must be int32 or int64, got float32"),
        ({"path": torch.zeros(2, 0).long()}, r"path must be \[batch, max_depth \+ 1\], got \[2, 0\]"),
        ({"path": torch.zeros(3, 3).long()}, r"path must be \[2, max_depth \+ 1\], got \[3, 3\]"),
        (
            {"out": GatherResult(torch.zeros(2, 3, 3).bfloat16(), torch.zeros(2).int())},
            r"out.values must be contiguous torch.float32 \[2, 3, 3\], got torch.bfloat16 \[2, 3, 3\]",
        ),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    arguments = {"values": torch.zeros(2, 4, 3), "path": torch.zeros(2, 3).long(), **change}
    with pytest.raises(ValueError, match="gather_nodes: " + message):
        gather_nodes(**arguments)
