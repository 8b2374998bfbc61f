"""Trees that the host builds, and trees in the spellings of other engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tree_cases import TREE_RULES, make_tree, random_parents

from specdec_kernels import (
    select_tree,
    tree_from_links,
    tree_from_lookahead,
    tree_from_marginals,
    tree_from_parents,
    tree_from_paths,
    tree_from_sequences,
    tree_layout,
    tree_links,
    tree_mask,
    use_backend,
    verify_tree,
)


@pytest.fixture(autouse=True)
def _on_the_reference():  # type: ignore[no-untyped-def]
    with use_backend("reference"):
        yield


# --- builders


def test_paths_are_sorted_whatever_their_order() -> None:
    paths = [[1, 0], [0], [0, 0, 0], [0, 1], [1], [0, 0]]
    tree = tree_from_paths(paths)
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 3]
    assert tree.ranks.tolist() == [-1, 0, 1, 0, 1, 0, 0]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert tree_from_paths([]).parents.tolist() == [-1]


def test_full_trees_have_medusas_numbers() -> None:
    """Every path of ranks below 3, 2 and 2: sizes per depth, indices, and leaves that cover the tree."""
    widths = (3, 2, 2)
    paths: list[tuple[int, ...]] = [()]
    for depth, width in enumerate(widths):
        paths += [(*p, r) for p in paths if len(p) == depth for r in range(width)]
    tree = tree_from_paths(paths[1:])
    assert torch.bincount(tree.depth).tolist() == [1, 3, 6, 12]
    layout = tree_layout(tree.parents[None], max_depth=3, max_leaves=12)
    assert int(layout.status) == 0
    assert set(layout.leaf_paths.flatten().tolist()) == set(range(22))
    assert int(tree_mask(tree.parents[None]).mask.sum()) == 1 + 3 * 2 + 6 * 3 + 12 * 4
    assert tree.tree_indices(top_k=4)[-1] == 1 + 2 * 4 + 1 and tree.tree_indices(top_k=4)[0] == 0


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0, 1, 2]], r"paths must be closed under prefixes: \[0, 1\] is missing, got \[0, 1, 2\]"),
        ([[0], [0]], r"paths must be distinct, got \[0\] twice"),
        ([[0], []], r"paths must be non-empty sequences of ranks >= 0, got \[\]"),
        ([[0], [-1]], r"paths must be non-empty sequences of ranks >= 0, got \[-1\]"),
        ([[0], 1], "paths must be sequences of ranks, which are ints, got 1"),
        ([[0.5]], r"paths must be sequences of ranks, which are ints, got \[0.5\]"),
        ("01", "paths must be sequences of ranks, which are ints, got '0'"),
        (None, "paths must be sequences of ranks, which are ints, got None"),
    ],
)
def test_bad_paths_are_refused(paths: Any, message: str) -> None:
    with pytest.raises(ValueError, match="tree_from_paths: " + message):
        tree_from_paths(paths)


def test_good_parents_come_back() -> None:
    for row in random_parents(5, 20, 6, ragged=True).tolist():
        assert tree_from_parents(row).tolist() == row


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], r"parents\[0\] must be -1 \(the root\), got nothing"),
        ([0, 5], r"parents\[0\] must be -1 \(the root\), got 0"),
        ([-1, 0, 7], r"parents\[2\] must be in \[-1, 3\), got 7"),
        ([-1, -2], r"parents\[1\] must be in \[-1, 2\), got -2"),
        ([-1, 1], "parents must be without cycle, got 1 -> 1"),
        ([-1, 0, 4, 2, 3], "parents must be without cycle, got 2 -> 4 -> 3 -> 2"),
        ([-1, 2, 0], r"parents\[1\] must be less than 1: a parent comes before its child, got 2"),
        ([-1, -1, 1], r"parents\[2\] must be a node, not padding, got 1"),
        ([-1, 0.0], r"parents\[1\] must be an int, got 0.0"),
        (torch.tensor([[-1, 0]]), r"parents\[0\] must be an int, got \[-1, 0\]"),
        (None, "parents must be a sequence of ints, got NoneType"),
    ],
)
def test_bad_parents_are_refused_with_the_reason(parents: Any, message: str) -> None:
    with pytest.raises(ValueError, match="tree_from_parents: " + message):
        tree_from_parents(parents)


def test_lookahead_has_a_window_of_columns_and_branches_of_guesses() -> None:
    columns = [-1, 0, 1, 0, 1, 2, 3, 4, 5]  # three rows of three: the first a chain, each below the one above it
    assert tree_from_lookahead(4, 3, 2).tolist() == [*columns, 0, 9, 10, 0, 12, 13]
    assert tree_from_lookahead(2, 1, 0).tolist() == [-1]


def test_lookahead_refuses_sizes_out_of_range() -> None:
    for arguments, message in (((1, 1, 1), "level must be >= 2"), ((2, 0, 1), "window"), ((2, 1, -1), "guesses")):
        with pytest.raises(ValueError, match="tree_from_lookahead: " + message):
            tree_from_lookahead(*arguments)


# --- links and masks, there and back

NODES = (1, 2, 7, 33, 200)


@pytest.mark.parametrize("engine", ["sglang", "tensorrt_llm"])
@pytest.mark.parametrize("nodes", NODES)
def test_links_lead_there_and_back(nodes: int, engine: str) -> None:
    parents = random_parents(5, nodes, 6, ragged=True, seed=nodes)
    links = tree_links(parents, engine=engine)
    layout = tree_layout(parents)
    assert torch.equal(links.next_token.int(), layout.first_child)
    assert torch.equal(links.next_sibling.int(), layout.next_sibling)
    first = torch.arange(5)[:, None] * nodes if engine == "sglang" else 0
    assert links.row.dtype == (torch.int64 if engine == "sglang" else torch.int32)
    assert torch.equal(links.row.long(), (first + torch.arange(nodes)).expand(5, -1))
    back = tree_from_links(links.next_token, links.next_sibling)
    assert torch.equal(back.parents, parents) and back.status.tolist() == [0] * 5


BAD_LINKS = {
    "a child before its parent": ([1, 0, -1], [-1, -1, -1]),
    "a child that is itself": ([0, -1, -1], [-1, -1, -1]),
    "out of range": ([3, -1, -1], [-1, -1, -1]),
    "below -1": ([-2, -1, -1], [-1, -1, -1]),
    "siblings in a circle": ([1, -1, -1], [-1, 2, 1]),
    "siblings that descend": ([2, -1, -1], [-1, -1, 1]),
    "two parents": ([1, 2, -1], [-1, 2, -1]),
    "siblings without a parent": ([-1, -1, -1], [-1, 2, -1]),
    "the root has a sibling": ([1, -1, -1], [2, -1, -1]),
    "padding with a child": ([-1, 2, -1], [-1, -1, -1]),
}


@pytest.mark.parametrize("fault", BAD_LINKS)
def test_bad_links_are_flagged(fault: str) -> None:
    good = ([1, -1, -1], [-1, 2, -1])
    child, sibling = (torch.tensor([good[i], BAD_LINKS[fault][i]]) for i in range(2))
    found = tree_from_links(child, sibling)
    assert found.status.tolist() == [0, 32]
    assert found.parents.tolist() == [[-1, 0, 0], [-1, -1, -1]]


def test_wrong_arguments_of_the_converters_say_what_to_do() -> None:
    links = torch.zeros(2, 3).long()
    with pytest.raises(ValueError, match=r"tree_from_links: next_sibling must be \[2, 3\], got \[2, 4\]"):
        tree_from_links(links, torch.zeros(2, 4).long())
    with pytest.raises(ValueError, match="tree_links: engine must be one of 'sglang', 'tensorrt_llm', got 'vllm'"):
        tree_links(torch.tensor([[-1, 0]]), engine="vllm")
    with pytest.raises(ValueError, match="tree_links: parents must be a tensor"):
        tree_links([[-1, 0]], engine="sglang")  # type: ignore[arg-type]


# --- no host synchronisation: nothing reads a value, so everything runs where there are none


def test_no_tree_function_waits_for_the_device() -> None:
    case = make_tree(3, 5, 20, filters="all").to("meta")
    for rule in TREE_RULES:
        result = verify_tree(*case.tensors, **{**case.keywords, "rule": rule}, logprobs="processed")
        assert result.token_ids.shape == (3, 5)
    assert tree_layout(case.parents).leaf_paths.shape == (3, 5, 5)
    past = case.token_ids[:, 0].contiguous()
    for name in ("bool", "additive", "flat", "flat_packed"):
        tree_mask(case.parents, past=past, size=40, format=name, window=3)
    for name in ("int32", "int64", "xqa", "sglang_packed"):
        tree_mask(case.parents, format=name)
    links = tree_links(case.parents, engine="sglang")
    tree_from_links(links.next_token, links.next_sibling)
    scores = case.target_logits[:, :, 0].contiguous()
    assert select_tree(case.token_ids, case.parents, scores, num_nodes=4).parents.shape == (3, 4)
    marginals = scores.float()[:, None]
    assert tree_from_marginals(case.token_ids[:, None], marginals, num_nodes=4).parents.shape == (3, 4)
    assert tree_from_sequences(case.token_ids[:, None], num_nodes=4).parents.shape == (3, 4)
