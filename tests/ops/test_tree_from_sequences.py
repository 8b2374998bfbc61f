"""tree_from_sequences: the trie, against one built with a dict of prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from check import assert_same

from specdec_kernels import (
    CandidateTree,
    RngKey,
    Sampling,
    tree_from_sequences,
    tree_layout,
    verify_chain,
    verify_tree,
)
from specdec_kernels.ops.tree_from_sequences import op

NAMES = CandidateTree._fields


def trie(sequences: list[list[int]], num_nodes: int) -> tuple[list[int], list[int], list[int]]:
    """(ids, parents, source) of the distinct prefixes in order of their first occurrence."""
    number: dict[tuple[int, ...], int] = {(): 0}
    ids, parents, source = [-1], [-1], [-1]
    for s, sequence in enumerate(sequences):
        for i, token in enumerate(sequence):
            prefix = tuple(sequence[: i + 1])
            if token < 0:
                break
            if prefix not in number:
                number[prefix] = len(ids)
                ids.append(token)
                parents.append(number[prefix[:-1]])
                source.append(s * len(sequence) + i)
    cut = [values[:num_nodes] + [-1] * (num_nodes - len(values)) for values in (ids, parents, source)]
    return cut[0], cut[1], cut[2]


@pytest.mark.parametrize(("sequences", "length"), [(1, 1), (1, 6), (7, 1), (6, 5), (40, 8)])
def test_tries_are_what_a_dict_of_prefixes_finds(
    backend: str, device: str, is_slow: bool, sequences: int, length: int
) -> None:
    batch = 2 if is_slow else 6
    tokens = torch.randint(0, 3, (batch, sequences, length))
    tokens[torch.rand(tokens.shape) < 0.1] = -1  # a sequence ends there, whatever follows
    for num_nodes in (None, 1, 5, 1 + sequences * length):
        found = tree_from_sequences(tokens.to(device), num_nodes=num_nodes)
        for b in range(batch):
            want = trie(tokens[b].tolist(), num_nodes or 1 + sequences * length)
            assert tuple(t[b].tolist() for t in found[:3]) == want
        assert found.status.tolist() == [0] * batch
        assert tree_layout(found.parents).status.tolist() == [0] * batch


def test_more_sequences_than_a_block_looks_at_and_more_nodes_than_there_may_be(backend: str, device: str) -> None:
    tokens = torch.randint(0, 30, (1, 300, 5))
    found = tree_from_sequences(tokens.to(device))
    assert tuple(t[0].tolist() for t in found[:3]) == trie(tokens[0].tolist(), 1024)
    assert int(found.source[0, -1]) > 0


def test_one_draft_is_a_chain(backend: str, device: str) -> None:
    draft = torch.tensor([[3, 1, 2], [0, -1, 4]], device=device)
    tree = tree_from_sequences(draft[:, None])
    assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1]]
    logits = torch.randn(2, 4, 5, device=device)
    rng = RngKey(torch.arange(2, device=device), torch.arange(2, device=device))
    common: dict[str, Any] = {"sampling": Sampling(), "rng": rng, "rule": "match"}
    found = verify_tree(tree.token_ids, tree.parents, logits, max_depth=3, **common)
    want = verify_chain(draft, logits, **common)
    assert_same(found[:1] + found[2:4], want[:3], ("token_ids", "num_accepted", "status"))


def test_no_sequences_and_no_tokens_give_the_root(backend: str, device: str) -> None:
    for shape in ((2, 0, 3), (2, 3, 0), (2, 0, 0)):
        found = tree_from_sequences(torch.zeros(shape, dtype=torch.int64, device=device))
        assert found.parents.tolist() == [[-1], [-1]]
    assert tree_from_sequences(torch.zeros(0, 2, 2, dtype=torch.int64, device=device)).parents.shape == (0, 5)


def test_an_id_below_minus_one_ends_its_sequence_and_is_flagged(backend: str, device: str) -> None:
    found = tree_from_sequences(torch.tensor([[[4, -7, 5]], [[4, -1, 5]]], device=device))
    assert found.parents.tolist() == [[-1, 0, -1, -1]] * 2 and found.status.tolist() == [4, 0]


def test_dtype_and_out(backend: str, device: str) -> None:
    tokens = torch.randint(0, 3, (3, 4, 2), device=device)
    want = tree_from_sequences(tokens.int())
    assert want.token_ids.dtype == torch.int32
    out = CandidateTree(*(torch.full_like(t, 99) for t in want))
    tree_from_sequences(tokens.int(), out=out)
    assert_same(tuple(out), tuple(want), NAMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [[[1]]]}, "token_ids must be a tensor of int32 or int64, got list"),
        ({"token_ids": torch.zeros(2, 3).long()}, r"token_ids must be \[batch, sequences, length\], got \[2, 3\]"),
        ({"num_nodes": 0}, "num_nodes must be a host int >= 1, got 0"),
        ({"num_nodes": 2000}, "num_nodes must be at most 1024, got 2000"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"token_ids": torch.zeros(2, 3, 4).long(), **change}
    with pytest.raises(ValueError, match="tree_from_sequences: " + message):
        tree_from_sequences(arguments.pop("token_ids"), **arguments)
    assert op.name == "tree_from_sequences"
