"""Distributions of tree verification by enumeration: lossless where claimed, biased where a pairing is wrong."""

from __future__ import annotations

import pytest
import torch
from exact_chains import chain_distribution
from exact_trees import (
    ceiling,
    drafts,
    expected_accepted,
    joint_error,
    node_distribution,
    output_distribution,
    path_ids,
    random_rows,
    rejection,
    tree_distribution,
)

SHAPES = {
    "two children": [-1, 0, 0],
    "three children": [-1, 0, 0, 0],
    "chain": [-1, 0, 1, 2],
    "comb": [-1, 0, 0, 1, 1],
    "second branch": [-1, 0, 0, 2, 2],
    "ragged": [-1, 0, 1, 0, 3],
    "deep": [-1, 0, 0, 1, 3],
}
LOSSLESS = [
    ("match", "iid"),
    ("match", "distinct"),
    ("match", "top"),
    ("target_only", "top"),
    ("iid", "iid"),
    ("recursive", "distinct"),
    ("recursive", "top"),
    ("greedy_multi_draft", "greedy_multi_draft"),
    ("traversal", "distinct"),
    ("traversal", "top"),
]


def _depth(parents: list[int]) -> int:
    return max(len(path_ids(parents, [0] * len(parents), n)) for n in range(len(parents)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rule", "kind"), LOSSLESS)
def test_lossless_rules_give_the_target_joint_distribution(rule: str, kind: str, shape: str) -> None:
    parents, vocab = SHAPES[shape], 4 if shape == "three children" else 3
    depth = _depth(parents)
    for seed in (1, 2):
        p, q = random_rows(vocab, depth, seed), random_rows(vocab, depth, seed + 50)
        distribution = output_distribution(rule, kind, parents, p, q)
        assert joint_error(distribution, p, vocab, depth + 1) < 1e-12


@pytest.mark.parametrize(("rule", "kind"), [("iid", "distinct"), ("recursive", "iid"), ("traversal", "iid")])
def test_g5_a_rule_on_siblings_of_the_other_kind_is_biased(rule: str, kind: str) -> None:
    p, q = random_rows(4, 1, 5), random_rows(4, 1, 55)
    distribution = output_distribution(rule, kind, [-1, 0, 0], p, q)
    assert joint_error(distribution, p, 4, 2) > 1e-2


def test_dropping_a_drawn_candidate_of_low_score_is_biased() -> None:
    """Rerank serves deterministic candidates only: keeping the likelier of two draws changes their distribution."""
    p, q = random_rows(4, 1, 5), random_rows(4, 1, 55)
    joint = torch.zeros(4).double()
    for tokens, weight in drafts("iid", [-1, 0, 0], q):
        best = max(tokens[1:], key=lambda x: float(q[()][x]))
        for ids, share in tree_distribution("iid", [-1, 0], [-1, best], p, q).items():
            joint[ids[0]] += weight * share
    assert float((joint - p[()]).abs().max()) > 1e-2


def test_g6_a_token_drawn_for_each_candidate_row_is_biased() -> None:
    """One draw a node is lossless; a fresh one for each path through it accepts too much of what was drafted."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ids, joint, alive = [0, 1], torch.zeros(3).double(), 1.0
    for i, x in enumerate(ids):
        joint[x] += alive * p[x]
        if i + 1 == len(ids):  # the last row's own draw is emitted
            joint += alive * torch.where(torch.arange(3) == x, 0.0, p)
        alive *= 1 - float(p[x])
    assert abs(float(joint.sum()) - 1) < 1e-12
    assert float((joint - p).abs().max()) > 0.1


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_acceptance_stays_below_the_optimal_transport_ceiling(seed: int, count: int) -> None:
    p, q = random_rows(4, 0, seed)[()], random_rows(4, 0, seed + 90)[()]
    star = [-1] + [0] * count
    reached = {}
    for rule, kind in LOSSLESS:
        distribution = output_distribution(
            rule, kind, star, random_rows(4, 1, 3) | {(): p}, random_rows(4, 1, 4) | {(): q}
        )
        reached[rule, kind] = expected_accepted(distribution)
        assert reached[rule, kind] <= ceiling(kind, p, q, count) + 1e-12, (rule, kind)
    # Sample and match is the optimum for deterministic candidates, greedy multi-draft for its own.
    top = p[q.argsort(descending=True)[:count]].sum()
    assert abs(reached["match", "top"] - float(top)) < 1e-12
    assert abs(reached["match", "top"] - reached["recursive", "top"]) < 1e-12
    kind = "greedy_multi_draft"
    assert abs(reached[kind, kind] - ceiling(kind, p, q, count)) < 1e-12
    if count == 1:
        overlap = float(torch.minimum(p, q).sum())
        for pair in (("iid", "iid"), ("recursive", "distinct"), (kind, kind), ("traversal", "distinct")):
            assert abs(reached[pair] - overlap) < 1e-12


def test_recursive_acceptance_has_its_closed_form() -> None:
    """P(all rejected) = prod TV(p^k, q) with replacement."""
    p, q = random_rows(4, 0, 7)[()], random_rows(4, 0, 8)[()]
    alive, current = 1.0, p
    for _ in range(3):
        rest = (current - q).clamp(min=0)
        alive *= float(rest.sum())
        current = rest / rest.sum()
    distribution = output_distribution(
        "iid", "iid", [-1, 0, 0, 0], random_rows(4, 1, 3) | {(): p}, random_rows(4, 1, 4) | {(): q}
    )
    assert abs(expected_accepted(distribution) - (1 - alive)) < 1e-12


@pytest.mark.parametrize("replacement", [False, True])
def test_the_scalar_form_equals_the_iterated_definition(replacement: bool) -> None:
    p, q = random_rows(5, 0, 21)[()], random_rows(5, 0, 22)[()]
    for ids in ([0, 1, 2], [4, 2, 0], [3, 1, 4]):
        c, z, gone, alive, shares = 0.0, 1.0, 0.0, 1.0, []
        for x in ids:
            accept = min(1.0, max(float(p[x] / q[x]) - c, 0.0) * (1 - gone) / z)
            shares.append(alive * accept)
            alive *= 1 - accept
            c += z / (1 - gone)
            z = float((p - c * q).clamp(min=0).sum())
            gone += 0.0 if replacement else float(q[x])
        want, rest = rejection(p, q, ids, replacement)
        assert max(abs(a - b) for a, b in zip(shares, want, strict=True)) < 1e-12
        if alive > 1e-9:  # else no rejection can lead here
            assert float(((p - c * q).clamp(min=0) / z - rest).abs().max()) < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_traversal_is_block_verification_on_a_chain(seed: int) -> None:
    p, q = random_rows(3, 3, seed), random_rows(3, 3, seed + 30)
    for tokens in ([-1, 0, 1, 2], [-1, 2, 2, 0]):
        ids = tuple(tokens[1:])
        rows_p = torch.stack([p[ids[:i]] for i in range(4)])
        rows_q = torch.stack([q[ids[:i]] for i in range(3)])
        block = chain_distribution(ids, rows_p, rows_q, "block")
        ours = tree_distribution("traversal", [-1, 0, 1, 2], tokens, p, q)
        assert max(abs(block.get(k, 0) - ours.get(k, 0)) for k in {*block, *ours}) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_traversal_is_recursive_rejection_on_one_level_and_no_worse_below(seed: int) -> None:
    p, q = random_rows(4, 2, seed), random_rows(4, 2, seed + 30)
    for tokens in ([-1, 0, 3], [-1, 2, 1]):
        ours, theirs = (tree_distribution(rule, [-1, 0, 0], tokens, p, q) for rule in ("traversal", "recursive"))
        assert max(abs(ours.get(k, 0) - theirs.get(k, 0)) for k in {*ours, *theirs}) < 1e-12
    for parents in ([-1, 0, 0, 1, 1], [-1, 0, 1, 0, 3]):
        down = expected_accepted(output_distribution("recursive", "distinct", parents, p, q))
        assert expected_accepted(output_distribution("traversal", "distinct", parents, p, q)) >= down - 1e-12


def test_target_only_is_recursive_rejection_of_point_masses() -> None:
    p = random_rows(5, 0, 3)[()]
    for ids in ([0, 4], [2, 1, 3]):
        ours, rest = node_distribution("target_only", p, None, ids)
        theirs, other = rejection(p, None, ids, replacement=False)
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-12
        assert float((rest - other).abs().max()) < 1e-12
