"""tree_layout: against walks node by node in plain Python, Medusa's own buffers, malformed trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from check import assert_same
from tree_cases import random_parents

from specdec_kernels import TreeLayout, tree_from_paths, tree_layout
from specdec_kernels.ops.tree_layout import op

NAMES = TreeLayout._fields


def walked(parents: list[int], start: int, max_depth: int, max_leaves: int) -> dict[str, Any]:
    """The layout of one tree, followed node by node."""
    nodes = range(len(parents))
    there = [n for n in nodes if n == 0 or parents[n] >= 0]
    path = {n: [n] for n in nodes}
    for n in there:
        while parents[path[n][0]] >= 0:
            path[n].insert(0, parents[path[n][0]])
    children = {n: [m for m in there if m > 0 and parents[m] == n] for n in nodes}
    words = (len(parents) + 31) // 32
    bits = [[sum(1 << (j % 32) for j in path[n] if j // 32 == w) for w in range(words)] for n in nodes]
    leaves = sorted((n for n in there if not children[n]), reverse=True)[:max_leaves]
    leaf_paths = [path[n] + [-1] * (max_depth + 1 - len(path[n])) for n in leaves]
    later = {m: next((k for k in children[parents[m]] if k > m), -1) for m in there if m > 0}
    return {
        "depth": [len(path[n]) - 1 if n in there else -1 for n in nodes],
        "positions": [start + len(path[n]) - 1 for n in nodes],
        "first_child": [min(children[n], default=-1) for n in nodes],
        "next_sibling": [later.get(n, -1) for n in nodes],
        "ancestors": [[w - 2**32 if w >= 2**31 else w for w in row] for row in bits],
        "leaf_paths": leaf_paths + [[-1] * (max_depth + 1)] * (max_leaves - len(leaves)),
    }


@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 64, 100])  # a root; around a word of bits; several words
def test_layouts_are_what_a_walk_finds(backend: str, device: str, nodes: int) -> None:
    batch, depth = 5, 6
    parents = random_parents(batch, nodes, depth, ragged=True, seed=nodes)
    lengths = torch.arange(batch) * 1000
    found = tree_layout(parents.to(device), lengths=lengths.to(device), max_depth=depth)
    for b in range(batch):
        want = walked(parents[b].tolist(), 1000 * b, depth, nodes)
        for name, value in want.items():
            assert getattr(found, name)[b].tolist() == value, name
    assert found.status.tolist() == [0] * batch


def test_medusas_small_tree_gives_medusas_buffers(backend: str, device: str) -> None:
    paths = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    tree = tree_from_paths(paths)
    layout = tree_layout(tree.parents[None].to(device), max_depth=3, max_leaves=3)
    assert tree.tree_indices().tolist() == [0, 1, 2, 11, 12, 11, 21]
    assert layout.positions[0].tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert layout.leaf_paths[0].tolist() == [[0, 1, 3, 6], [0, 2, 5, -1], [0, 1, 4, -1]]
    bits = [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1001011]
    assert layout.ancestors[0, :, 0].tolist() == bits


def test_a_thousand_and_twenty_four_nodes(backend: str, device: str) -> None:
    chain = torch.arange(1024) - 1
    star = torch.where(chain < 0, -1, 0)
    found = tree_layout(torch.stack([chain, star]).to(device))
    assert found.depth[0].tolist() == list(range(1024)) and int(found.depth[1].sum()) == 1023
    assert bool((found.ancestors[0, -1] == -1).all())
    assert found.leaf_paths[0, 0].tolist() == list(range(1024))
    assert found.leaf_paths[1, :1023, 1].tolist() == list(range(1023, 0, -1))


MALFORMED = {
    "cycle": [-1, 2, 1, 0],
    "its own parent": [-1, 1, 0, 0],
    "parent after child": [-1, 3, 0, 0],
    "out of range": [-1, 0, 4, 0],
    "far out of range": [-1, 0, 2**31 - 1, 0],
    "below -1": [-1, 0, -2, 0],
    "no root": [0, 0, 0, 0],
    "parent is padding": [-1, -1, 1, 0],
    "too deep": [-1, 0, 1, 2],
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_tree_is_flagged_and_counts_as_its_root(backend: str, device: str, fault: str) -> None:
    good, root = [-1, 0, 1, 0], [-1, -1, -1, -1]
    parents = torch.tensor([good, MALFORMED[fault], good], device=device)
    found = tree_layout(parents, max_depth=2)
    want = tree_layout(torch.tensor([good, root, good], device=device), max_depth=2)
    assert found.status.tolist() == [0, 32, 0]
    assert_same(tuple(found[:-1]), tuple(want[:-1]), NAMES[:-1])


def test_leaves_that_do_not_fit_are_flagged(backend: str, device: str) -> None:
    found = tree_layout(torch.tensor([[-1, 0, 0, 0]], device=device), max_depth=1, max_leaves=2)
    assert found.status.tolist() == [32] and found.leaf_paths[0].tolist() == [[0, 3], [0, 2]]


def test_more_rows_than_nodes_are_padded(backend: str, device: str) -> None:
    found = tree_layout(torch.tensor([[-1, 0]], device=device), max_leaves=4)
    assert found.leaf_paths[0].tolist() == [[0, 1]] + [[-1, -1]] * 3


def test_out_receives_the_results(backend: str, device: str) -> None:
    parents = random_parents(3, 9, 4).to(device)
    want = tree_layout(parents)
    out = TreeLayout(*(torch.full_like(t, 99) for t in want))
    assert all(a is b for a, b in zip(tree_layout(parents, out=out), out, strict=True))
    assert_same(tuple(out), tuple(want), NAMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": [-1]}, "parents must be a tensor of int32 or int64, got list"),
        ({"parents": torch.zeros(4).int()}, r"parents must be \[batch, nodes\], got \[4\]"),
        ({"parents": torch.zeros(2, 1025).int()}, "parents must be .* with 1 .the root. to 1024 nodes"),
        ({"lengths": torch.zeros(3).long()}, r"lengths must be \[2\], got \[3\]"),
        ({"max_depth": -1}, "max_depth must be a host int >= 0, got -1"),
        ({"max_leaves": 0}, "max_leaves must be a host int >= 1, got 0"),
        ({"max_depth": 2**63 - 1}, r"max_depth must be a host int < 2\^40, got 9223372036854775807"),
        ({"max_leaves": 2**62}, r"max_leaves must be a host int < 2\^40, got 4611686018427387904"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"parents": torch.tensor([[-1, 0]] * 2), **change}
    with pytest.raises(ValueError, match="tree_layout: " + message):
        tree_layout(arguments.pop("parents"), **arguments)
    assert op.name == "tree_layout"
