"""select_tree: EAGLE's expand and rerank, connected whatever the scores."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from check import assert_same
from torch import Tensor
from tree_cases import random_parents

from specdec_kernels import CandidateTree, select_tree, tree_layout
from specdec_kernels.ops.select_tree import op

NAMES = CandidateTree._fields
INF, NAN = float("inf"), float("nan")


def best(parents: list[int], scores: list[float], ids: list[int], num_nodes: int) -> list[int]:
    """Indices that are kept: the best by the worst score on their path, ties to the smaller index."""
    worst = [INF]
    for n in range(1, len(parents)):
        usable = parents[n] >= 0 and ids[n] >= 0 and not math.isnan(scores[n])
        worst.append(min(scores[n], worst[parents[n]]) if usable else -INF)
    order = sorted(range(len(parents)), key=lambda n: (-worst[n], n))[:num_nodes]
    return sorted(n for n in order if worst[n] > -INF)


@pytest.mark.parametrize("scores", ["falling", "any", "ties", "nan"])
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 40, 60])  # the root; a few; all; more than there are
def test_the_best_are_kept_connected_and_in_order(backend: str, device: str, scores: str, num_nodes: int) -> None:
    batch, candidates = 6, 40
    parents = random_parents(batch, candidates, 5, ragged=True, seed=2)
    ids = torch.randint(0, 100, (batch, candidates))
    score = -torch.rand(batch, candidates)
    if scores == "falling":  # cumulative log-probabilities
        for n in range(1, candidates):
            score[:, n] += torch.where(
                parents[:, n] > 0, score.gather(1, parents[:, n : n + 1].clamp(min=0))[:, 0], 0.0
            )
    elif scores == "ties":
        score = (score * 3).round() / 3
    elif scores == "nan":
        score[torch.rand(score.shape) < 0.2] = NAN
        score[torch.rand(score.shape) < 0.1] = -INF
        ids[torch.rand(score.shape) < 0.1] = -1
    found = select_tree(ids.to(device), parents.to(device), score.to(device), num_nodes=num_nodes)
    for b in range(batch):
        kept = best(parents[b].tolist(), score[b].tolist(), ids[b].tolist(), num_nodes)
        fill = [-1] * (num_nodes - len(kept))
        assert found.source[b].tolist() == kept + fill
        assert found.token_ids[b].tolist() == [int(ids[b, n]) for n in kept] + fill
        places = [kept.index(int(parents[b, n])) if n else -1 for n in kept]
        assert found.parents[b].tolist() == places + fill
    assert tree_layout(found.parents).status.tolist() == [0] * batch


def test_a_thousand_and_twenty_four_candidates(backend: str, device: str) -> None:
    parents, score = random_parents(1, 1024, 20), -torch.rand(1, 1024)
    ids = torch.arange(1024)[None]
    found = select_tree(ids.to(device), parents.to(device), score.to(device), num_nodes=300)
    assert found.source[0].tolist() == best(parents[0].tolist(), score[0].tolist(), ids[0].tolist(), 300)


def eagle(rows: Tensor, k: int, depth: int) -> tuple[list[int], list[int], list[float]]:
    """EAGLE-2's candidates under a model whose row depends on the last token: (ids, parents, scores)."""
    logp = rows.log_softmax(-1)
    ids, parents, scores = [0], [-1], [0.0]
    beam = [0]
    for _ in range(depth):
        layer = []
        for node in beam:
            top = logp[ids[node]].topk(k)
            for value, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                layer.append(len(ids))
                ids.append(token)
                parents.append(node)
                scores.append(scores[node] + value)
        beam = sorted(sorted(layer, key=lambda n: -scores[n])[:k])
    return ids, parents, scores


@pytest.mark.parametrize(("k", "depth", "keep"), [(3, 3, 8), (4, 2, 20), (1, 5, 6), (3, 3, 22)])
def test_expand_and_rerank_as_eagle_does(backend: str, device: str, k: int, depth: int, keep: int) -> None:
    g = torch.Generator().manual_seed(k)
    rows = torch.randn(6, 6, generator=g)
    ids, parents, scores = eagle(rows, k, depth)
    found = select_tree(
        torch.tensor([ids], device=device), torch.tensor([parents], device=device),
        torch.tensor([scores], device=device), num_nodes=keep,
    )  # fmt: skip
    source, new = found.source[0].tolist(), found.parents[0].tolist()
    top = sorted(torch.tensor(scores[1:]).topk(min(keep - 1, len(ids) - 1)).indices.tolist())
    assert [n for n in source if n > 0] == [n + 1 for n in top]
    logp = rows.log_softmax(-1)
    for node, parent in enumerate(new):
        if parent >= 0:  # scores are the log-probabilities of the paths
            assert parent < node
            step = float(logp[int(found.token_ids[0, parent]), int(found.token_ids[0, node])])
            assert abs(scores[source[node]] - scores[source[parent]] - step) < 1e-5
    if k == 1:  # a beam of one is the greedy chain
        assert new == list(range(-1, keep - 1))
    if keep == len(ids):  # nothing to choose: the whole tree
        assert new == parents


def test_a_malformed_tree_keeps_its_root(backend: str, device: str) -> None:
    ids, scores = torch.tensor([[9, 1, 2]] * 2, device=device), torch.zeros(2, 3, device=device)
    found = select_tree(ids, torch.tensor([[-1, 2, 1], [-1, 0, 1]], device=device), scores, num_nodes=3)
    assert found.status.tolist() == [32, 0]
    assert found.token_ids.tolist() == [[9, -1, -1], [9, 1, 2]]


def test_dtypes_and_out(backend: str, device: str) -> None:
    parents = random_parents(3, 9, 3).long().to(device)
    ids = torch.randint(0, 9, (3, 9), device=device).int()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scores = torch.randn(3, 9, device=device).to(dtype)
        want = select_tree(ids, parents, scores, num_nodes=5)
        out = CandidateTree(*(torch.full_like(t, 99) for t in want))
        select_tree(ids, parents, scores, num_nodes=5, out=out)
        assert_same(tuple(out), tuple(want), NAMES)
        assert want.token_ids.dtype == torch.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.zeros(2, 4).long()}, r"token_ids must be \[2, 3\], got \[2, 4\]"),
        ({"scores": torch.zeros(2, 3).double()}, "scores must be float32 or bfloat16 or float16"),
        ({"num_nodes": 0}, "num_nodes must be a host int >= 1, got 0"),
        ({"num_nodes": 2**62}, r"num_nodes must be a host int < 2\^40, got 4611686018427387904"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "token_ids": torch.zeros(2, 3).long(),
        "parents": torch.tensor([[-1, 0, 0]] * 2),
        "scores": torch.zeros(2, 3),
        "num_nodes": 2,
        **change,
    }
    with pytest.raises(ValueError, match="select_tree: " + message):
        select_tree(*[arguments.pop(name) for name in ("token_ids", "parents", "scores")], **arguments)
    assert op.name == "select_tree"
