"""How the server cuts drafts: the best nodes of trees, under one budget with the chains beside them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from tree_cases import random_parents

from specdec_kernels import use_backend
from specdec_loop import StepTimes
from specdec_loop.draft_length import AdaptiveLength, FixedLength
from specdec_loop.drafters import Draft
from specdec_loop.serve.allotment import Allotment, Ranks
from specdec_loop.serve.request import Request
from specdec_loop.serve.verification import nodes_of


class Running(Request):
    """A request that has so many tokens to go."""

    left = 99  # type: ignore[assignment]


def tree(parents: list[int], ids: list[int] | None = None) -> Draft:
    given = list(range(len(parents))) if ids is None else ids
    return Draft(torch.tensor([given]), parents=torch.tensor([parents]).int(), max_depth=deepest(parents))


def deepest(parents: list[int]) -> int:
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    return max(depth)


@pytest.mark.parametrize("chosen", ["cuda", "triton", "reference"])
def test_cuts_are_made_on_the_host_whatever_backend_the_device_has(chosen: str) -> None:
    chain = Draft(torch.tensor([[5, 6, 7, 8]]))
    with use_backend(chosen):
        kept = Allotment(FixedLength(4), 3).cut([Running([1]), Running([1])], [chain, chain], own=2)
    assert sorted(draft.token_ids.shape[1] for draft in kept) == [1, 2]


def test_ranks_are_known_by_what_was_accepted_of_late() -> None:
    ranks = Ranks()
    assert ranks.chances(3) == [0.5, 0.25, 0.125]
    parents = [-1, 0, 0, 0, 2, 2, 4]  # the second child of the root, then its first, then its only one
    for _ in range(800):
        ranks.learn(parents, [2, 4, 6])
    first, second, third = ranks.chances(3)  # of three first children two were taken, of two second ones one
    assert first == pytest.approx(2 / 3, abs=0.01) and second == pytest.approx(1 / 2, abs=0.01) and third < 0.02
    for _ in range(800):
        ranks.learn(parents, [2])
    first, second = ranks.chances(2)
    assert first == second < 0.04  # never more than the rank before


def test_the_kept_nodes_are_the_likeliest_tree_of_as_many() -> None:
    """Beside all trees of so many nodes, of random trees under random ranks."""
    rng = random.Random(2)
    for case in range(40):
        count, budget = rng.randint(2, 8), rng.randint(1, 5)
        parents = random_parents(1, count, 4, seed=case)[0].tolist()
        allotment = Allotment(FixedLength(4), budget)
        for _ in range(200):
            allotment.ranks.learn([-1, 0, 0, 0, 0], [rng.choice([1, 1, 2, 3, 4])])
        chances = allotment.ranks.chances(count)
        request = Running([1])
        score, children = [1.0], [0] * count
        for parent in parents[1:]:
            score.append(score[parent] * chances[children[parent]])
            children[parent] += 1
        (kept,) = allotment.cut([request], [tree(parents)], own=1)
        nodes = kept.token_ids[0].tolist()  # they are their numbers
        chosen = range(1, count), min(budget, count - 1)
        best = max(
            sum(score[n] for n in some)
            for some in itertools.combinations(*chosen)
            if all(parents[n] in (0, *some) for n in some)
        )
        assert len(nodes) == 1 + chosen[1] and nodes[0] == 0
        assert sum(score[n] for n in nodes[1:]) == pytest.approx(best)
        assert kept.parents is not None
        assert [nodes[p] for p in kept.parents[0, 1:]] == [parents[n] for n in nodes[1:]]
        assert kept.max_depth == deepest(kept.parents[0].tolist())


def test_trees_and_chains_share_a_budget() -> None:
    allotment = Allotment(FixedLength(4), 5)
    good, bad, chain = Running([1]), Running([2]), Running([3])
    for _ in range(60):
        good.learn(3, 3)
        bad.learn(3, 0)
        chain.learn(4, 2)
    shapes = [tree([-1, 0, 0, 1, 1]), tree([-1, 0, 0, 1, 1]), Draft(torch.tensor([[5, 6, 7, 8]]))]
    cut = allotment.cut([good, bad, chain], shapes, own=3)
    given = [nodes_of(draft) - 1 for draft in cut]
    assert sum(given) == 5 and given[0] > given[1] and given[2] > 0


def test_nodes_that_are_not_there_or_behind_the_limit_are_left_out() -> None:
    short = Running([1])
    short.left = 2
    allotment = Allotment(FixedLength(4), 9)
    (kept,) = allotment.cut([short], [tree([-1, 0, 0, 1, 2], ids=[0, -1, 7, 8, 9])], own=1)
    assert kept.token_ids.tolist() == [[0, 7]] and kept.max_depth == 1  # 8 has no parent, 9 would be the third token
    whole = tree([-1, 0, 0, 1, 2])
    assert Allotment(FixedLength(4), None).cut([short], [whole], own=1) == [whole]


def test_a_tree_that_must_be_whole_counts_as_the_step_itself() -> None:
    class Steep(StepTimes):
        asked = 0

        def table(self, batch: int, budget: int) -> torch.Tensor:
            self.asked = batch
            return 1.0 + 10 * torch.arange(budget + 1)

    allotment = Allotment(AdaptiveLength(4), None)
    allotment.times = Steep()
    whole = tree([-1, 0, 0])._replace(candidates=2)
    cut = allotment.cut([Running([1]), Running([2])], [whole, tree([-1, 0, 0])], own=2)
    assert cut[0] is whole and nodes_of(cut[1]) == 1 and cut[1].max_depth == 0
    assert allotment.times.asked == 4
