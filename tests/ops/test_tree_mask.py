"""tree_mask: every format against the one predicate, written with Python loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from check import assert_same
from torch import Tensor
from tree_cases import random_parents

from specdec_kernels import TreeMask, tree_from_lookahead, tree_layout, tree_mask
from specdec_kernels.ops.tree_mask import op

NODES = (1, 2, 8, 9, 17, 32, 33, 70)  # a root; the edges of 8, 16, 32 and 64 bits


def attended(parents: list[int], past: int = 0, padding: int = 0, window: int = 0) -> list[list[bool]]:
    """Rows [nodes, past + nodes] by following parents."""
    rows = []
    for n in range(len(parents)):
        path = [n]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        is_padding = n > 0 and parents[n] < 0
        position = {past + m: len(path) - 1 - i for i, m in enumerate(path)}  # relative to the root
        if not is_padding:
            position |= {column: column - past for column in range(padding, past)}
        mine = len(path) - 1
        rows.append(
            [
                c in position and (not window or mine - position[c] < window)
                for c in range(past + len(parents))
            ]
        )  # fmt: skip
    return rows


def ragged(nodes: int) -> tuple[Tensor, list[int], list[int]]:
    return random_parents(4, nodes, 5, ragged=True, seed=nodes), [0, 7, 3, 12], [0, 2, 3, 5]


def unpacked(words: Tensor, nodes: int) -> Tensor:
    """Bits [batch, nodes, nodes] of packed rows, lowest first."""
    data = words.contiguous().view(torch.uint8)
    bits = (data[..., None] >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1
    assert not bits.flatten(-2)[..., nodes:].any()
    return bits.flatten(-2)[..., :nodes].bool()


@pytest.mark.parametrize("window", [0, 1, 3, 9])
@pytest.mark.parametrize("nodes", NODES)
def test_dense_masks_are_the_predicate(backend: str, device: str, nodes: int, window: int) -> None:
    parents, past, padding = ragged(nodes)
    size = 12 + nodes + 2
    common: dict[str, Any] = {
        "past": torch.tensor(past, device=device),
        "left_padding": torch.tensor(padding, device=device),
        "window": window,
        "size": size,
    }
    found = tree_mask(parents.to(device), **common)
    for b in range(4):
        rows = attended(parents[b].tolist(), past[b], padding[b], window)
        assert found.mask[b, 0].tolist() == [row + [False] * (size - len(row)) for row in rows]
    assert bool(found.mask.any(-1).all())  # no row is empty, so no softmax is NaN
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        additive = tree_mask(parents.to(device), format="additive", dtype=dtype, **common).mask
        assert additive.dtype == dtype and torch.equal(additive == 0, found.mask)
        assert bool((additive[~found.mask] == torch.finfo(dtype).min).all())


@pytest.mark.parametrize("nodes", NODES)
def test_packed_masks_hold_the_ancestors(backend: str, device: str, nodes: int) -> None:
    parents, _, _ = ragged(nodes)
    for window in (0, 2):
        want = torch.tensor([attended(row, window=window) for row in parents.tolist()], device=device)
        shapes = {"int32": torch.int32, "int64": torch.int64, "xqa": torch.uint16}
        for name, dtype in shapes.items():
            found = tree_mask(parents.to(device), format=name, window=window).mask
            assert found.dtype == dtype and torch.equal(unpacked(found, nodes), want), name
        assert torch.equal(tree_mask(parents.to(device), window=window).mask[:, 0], want)
        if nodes <= 32:
            found = tree_mask(parents.to(device), format="sglang_packed", window=window).mask
            assert found.dtype == (torch.uint8 if nodes <= 8 else torch.uint16 if nodes <= 16 else torch.uint32)
            assert torch.equal(unpacked(found.view(4, nodes, 1), nodes), want)
    assert torch.equal(tree_mask(parents.to(device), format="int32").mask, tree_layout(parents.to(device)).ancestors)


@pytest.mark.parametrize("nodes", NODES)
def test_flat_masks_hold_one_request_after_the_other(backend: str, device: str, nodes: int) -> None:
    parents, past, padding = ragged(nodes)
    rows = [attended(parents[b].tolist(), past[b], padding[b]) for b in range(4)]
    flat = [[cell for row in request for cell in row] for request in rows]
    common: dict[str, Any] = {
        "past": torch.tensor(past, device=device),
        "left_padding": torch.tensor(padding, device=device),
    }
    total = sum(map(len, flat))
    found = tree_mask(parents.to(device), format="flat", size=total + 5, **common)
    assert found.mask.tolist() == [*itertools.chain(*flat), *[False] * 5]
    assert found.offsets is not None and found.offsets.tolist() == [sum(map(len, flat[:b])) for b in range(5)]

    octets = [
        [sum(bit << k for k, bit in enumerate(cells[i : i + 8])) for i in range(0, len(cells), 8)] for cells in flat
    ]
    packed = tree_mask(parents.to(device), format="flat_packed", size=sum(map(len, octets)), **common)
    assert packed.mask.dtype == torch.uint8 and packed.mask.tolist() == [*itertools.chain(*octets)]
    assert packed.offsets is not None and packed.offsets.tolist() == [sum(map(len, octets[:b])) for b in range(5)]


@pytest.mark.parametrize("window", [0, 4, 700])
def test_flat_masks_over_a_long_past_are_the_predicate(backend: str, device: str, window: int) -> None:
    """Rows of 512 elements and more, of which a block of a kernel holds two, beside short ones."""
    parents, _, padding = ragged(9)
    past = [600, 0, 503, 1300]
    rows = [attended(parents[b].tolist(), past[b], padding[b], window) for b in range(4)]
    cells = [[cell for row in request for cell in row] for request in rows]
    common: dict[str, Any] = {
        "past": torch.tensor(past, device=device),
        "left_padding": torch.tensor(padding, device=device),
        "window": window,
    }
    flat = tree_mask(parents.to(device), format="flat", size=sum(map(len, cells)), **common).mask
    assert flat.tolist() == [*itertools.chain(*cells)]
    octets = [-(-len(one) // 8) for one in cells]
    packed = tree_mask(parents.to(device), format="flat_packed", size=sum(octets), **common).mask
    for one, part in zip(cells, packed.cpu().split(octets), strict=True):
        bits = (part[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        assert bits.flatten().tolist() == [*map(int, one), *[0] * (-len(one) % 8)]


def test_a_host_length_needs_no_size(backend: str, device: str) -> None:
    parents = random_parents(3, 6, 3).to(device)
    dense = tree_mask(parents, past=4).mask
    assert list(dense.shape) == [3, 1, 6, 10]
    assert torch.equal(tree_mask(parents, past=4, format="flat").mask, dense.flatten())
    square = tree_mask(parents, format="flat").mask  # SGLang's QLEN_ONLY
    assert torch.equal(square, tree_mask(parents).mask.flatten())
    packed = tree_mask(parents, past=4, format="flat_packed").mask
    assert len(packed) == 3 * 8


def test_a_size_that_cuts_a_mask_keeps_what_lies_before(backend: str, device: str) -> None:
    """At every element: within a row, between rows, between requests, behind the last."""
    parents = random_parents(2, 9, 3).to(device)
    past = torch.tensor([5, 3], device=device)
    for name, full in (("flat", 9 * (14 + 12)), ("flat_packed", 16 + 14), ("bool", 14)):
        whole = tree_mask(parents, past=past, format=name, size=full).mask
        for size in range(full + 3):
            cut = tree_mask(parents, past=past, format=name, size=size).mask
            assert torch.equal(cut[..., :full], whole[..., :size]) and not cut[..., full:].any()
    beyond = torch.full((2,), 2**33, device=device)  # a row longer than 32 bits count
    assert bool(tree_mask(parents, past=beyond, format="flat", size=40).mask.all())
    assert bool((tree_mask(parents, past=beyond, format="flat_packed", size=40).mask == 255).all())


@pytest.mark.parametrize("past", [2**40 + 1, 2**62, 2**63 - 1])
def test_no_sum_with_a_huge_past_overflows(backend: str, device: str, past: int) -> None:
    parents, behind = torch.tensor([[-1, 0, 0, 1]], device=device), torch.tensor([past], device=device)
    found = tree_mask(parents, past=behind, window=2, size=20)
    assert not found.mask.any()  # a window away
    flat = tree_mask(parents, past=behind, format="flat", size=20)
    assert bool(flat.mask.all()) and flat.offsets is not None and flat.offsets.tolist() == [0, 4 * (2**40 + 4)]
    packed = tree_mask(parents, past=behind, format="flat_packed", size=20)
    assert bool((packed.mask == 255).all())
    assert packed.offsets is not None and packed.offsets.tolist() == [0, (2**40 + 4) // 2]


@pytest.mark.parametrize(("level", "window", "guesses"), [(2, 1, 0), (2, 4, 3), (3, 2, 1), (5, 4, 2), (4, 1, 5)])
def test_the_lookahead_layout_is_a_tree(backend: str, device: str, level: int, window: int, guesses: int) -> None:
    """Row r, column j sits at r + j and sees row 0 up to j and column j up to r; an n-gram sees the last token and
    itself.
    """
    parents = tree_from_lookahead(level, window, guesses, device=device)
    queries = (level - 1) * (window + guesses)
    place: list[tuple[int, ...]] = [(r, j) for r in range(level - 1) for j in range(window)]
    place += [(-1, g, i) for g in range(guesses) for i in range(level - 1)]
    assert len(parents) == queries == len(place)

    def sees(query: tuple[int, ...], key: tuple[int, ...]) -> bool:
        if query[0] < 0:
            return key == (0, 0) or (key[:2] == query[:2] and len(key) == 3 and key[2] <= query[2])
        return key[0] >= 0 and ((key[0] == 0 and key[1] <= query[1]) or (key[1] == query[1] and key[0] <= query[0]))

    mask = tree_mask(parents[None]).mask[0, 0]
    assert mask.tolist() == [[sees(query, key) for key in place] for query in place]
    positions = tree_layout(parents[None]).positions[0].tolist()
    assert positions == [p[0] + p[1] if p[0] >= 0 else 1 + p[2] for p in place]


def test_a_malformed_tree_is_flagged(backend: str, device: str) -> None:
    found = tree_mask(torch.tensor([[-1, 0, 1], [-1, 2, 1]], device=device))
    assert found.status.tolist() == [0, 32]
    assert torch.equal(found.mask[1, 0], torch.eye(3, device=device).bool())


def test_out_receives_the_results_and_no_request_is_fine(backend: str, device: str) -> None:
    parents = random_parents(2, 5, 3).to(device)
    for name in ("bool", "flat"):
        want = tree_mask(parents, past=3, format=name)
        offsets = None if want.offsets is None else torch.full_like(want.offsets, 99)
        out = TreeMask(torch.ones_like(want.mask), offsets, torch.full_like(want.status, 99))
        got = tree_mask(parents, past=3, format=name, out=out)
        assert got.mask is out.mask
        assert_same(tuple(got), tuple(want), TreeMask._fields)
    for name in ("bool", "additive", "flat", "flat_packed", "int32", "int64", "xqa", "sglang_packed"):
        none = tree_mask(parents[:0], format=name).mask
        assert none.numel() == 0 and none.dtype == tree_mask(parents, format=name).mask.dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "dense"}, "format must be one of 'bool', 'additive', 'flat'"),
        ({"past": torch.zeros(2).long()}, "size must be given where past is a tensor"),
        ({"past": torch.zeros(3).long(), "size": 9}, r"past must be \[2\], got \[3\]"),
        ({"past": -1}, "past must be a host int >= 0, got -1"),
        ({"past": 2**63 - 1, "size": 9}, r"past must be a host int < 2\^40, got 9223372036854775807"),
        ({"size": 2**62}, r"size must be a host int < 2\^40, got 4611686018427387904"),
        ({"out": TreeMask(torch.ones(2, 1, 3, 3) > 0, None, None)}, "out.status must be a tensor, got NoneType"),
        ({"past": 3, "format": "int32"}, "past must be left out for format 'int32'"),
        ({"window": -1}, "window must be a host int >= 0"),
        ({"format": "additive", "dtype": torch.float64}, "dtype must be float32, bfloat16 or float16"),
        ({"format": "int32", "dtype": torch.float16}, "dtype must be left out for format 'int32'"),
        (
            {"parents": torch.zeros(2, 33).int(), "format": "sglang_packed"},
            "parents must be of at most 32 nodes for format 'sglang_packed'",
        ),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"parents": torch.tensor([[-1, 0]] * 2), **change}
    with pytest.raises(ValueError, match="tree_mask: " + message):
        tree_mask(arguments.pop("parents"), **arguments)
    assert op.name == "tree_mask"
