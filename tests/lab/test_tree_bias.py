"""Frequencies of verify_tree and batch_sd against the exact distributions, and the twins that must fail.

False-alarm rate of each test: 1e-6 (tests/check.py). Numbers G1 to G7 are the global rules of docs/design.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FILTERS, make_rng
from check import assert_biased, assert_distribution, assert_same
from exact_chains import processed
from exact_trees import Rows, path_ids, tree_distribution
from torch import Tensor

from specdec_kernels import RngKey, Sampling, batch_sd, sample, use_backend, verify_chain, verify_tree
from specdec_kernels.ops.verify_tree import op  # noqa: F401  its backends are the ones that run here
from specdec_lab.lossless.exact import constant_table, joint_counts, joint_distribution
from specdec_lab.lossless.experiments import decode
from specdec_lab.lossless.procedures import Procedure

# --- the exact distributions of docs/design.md against frequencies

LAWS = {
    "match": ("match", None),
    "target_only": ("target_only", None),
    "recursive": ("recursive", "q"),
    "iid": ("recursive", "q"),
    "recursive of point masses": ("recursive", None),
    "greedy_multi_draft": ("greedy_multi_draft", "q"),
    "traversal": ("traversal", "q"),
    "traversal of point masses": ("traversal", None),
}
SHAPE = [-1, 0, 0, 1, 1, 2, 0, 3]
TOKENS = [-1, 2, 0, 1, 3, 2, 1, 0]


def _frequencies(
    device: str, distribution: str, batch: int, filters: str = "temperature", seed: int = 44
) -> tuple[Tensor, Tensor]:
    """(counts, distribution) of the emitted ids over many seeds, for one drafted tree."""
    vocab, g = 4, torch.Generator().manual_seed(seed)
    options: dict[str, Any] = FILTERS[filters]
    rule, has_draft = LAWS[distribution]
    target = torch.randn(len(SHAPE), vocab, generator=g)
    drafted = 0.5 * target + torch.randn(len(SHAPE), vocab, generator=g)
    p: Rows = {path_ids(SHAPE, TOKENS, n): processed(target[n], **options) for n in range(len(SHAPE))}
    q: Rows = {path_ids(SHAPE, TOKENS, n): processed(drafted[n]) for n in range(len(SHAPE))}
    exact = tree_distribution("iid" if distribution == "iid" else rule, SHAPE, TOKENS, p, q if has_draft else None)
    result = verify_tree(
        torch.tensor(TOKENS, device=device).repeat(batch, 1),
        torch.tensor(SHAPE, device=device).repeat(batch, 1),
        target.to(device).expand(batch, -1, -1),
        drafted.to(device).expand(batch, -1, -1) if has_draft else None,
        max_depth=3,
        sampling=Sampling.full(batch, device=device, **options),
        draft_sampling=Sampling(),
        rng=RngKey(*(t.to(device) for t in make_rng(batch))),
        rule=rule,
        replacement=distribution == "iid",
    )
    assert int(result.status.max()) == 0
    seen: dict[tuple[int, ...], int] = {}
    for row in result.token_ids.tolist():
        key = tuple(t for t in row if t >= 0)
        seen[key] = seen.get(key, 0) + 1
    keys = sorted({*exact, *seen})
    return torch.tensor([seen.get(k, 0) for k in keys]), torch.tensor([exact.get(k, 0.0) for k in keys])


@pytest.mark.parametrize("filters", ["temperature", "top_k", "top_p"])
@pytest.mark.parametrize("distribution", LAWS)
def test_frequencies_follow_the_exact_distribution_of_the_tree(
    backend: str, device: str, is_slow: bool, distribution: str, filters: str
) -> None:
    counts, exact = _frequencies(device, distribution, 600 if is_slow else 30_000, filters)
    assert abs(float(exact.sum()) - 1) < 1e-6
    assert_distribution(counts, exact, f"{distribution}, {filters}")


@pytest.mark.parametrize(
    ("run_as", "held_against"), [("iid", "recursive"), ("recursive", "iid"), ("recursive", "traversal")]
)
def test_the_distribution_of_another_rule_is_found_out(run_as: str, held_against: str) -> None:
    """The twins: outcomes have the same names, only their shares differ."""
    with use_backend("reference"):
        counts, exact = _frequencies("cpu", run_as, 30_000)
        _, other = _frequencies("cpu", held_against, 4)
    assert_distribution(counts, exact, run_as)
    assert_biased(counts, other, f"{run_as} against {held_against}")


# --- whole steps: candidates drawn by `sample` with the lanes of docs/design.md


def _step(device: str, batch: int, *, kind: str, rule: str, replacement: bool) -> tuple[Tensor, Tensor]:
    """(counts, distribution) of the first two tokens of one step with two siblings on each of two levels."""
    vocab, g = 3, torch.Generator().manual_seed(23)
    target = torch.randn(1 + vocab, vocab, generator=g).to(device)  # row 0: the root; row 1 + x: after x
    draft = (0.5 * target.cpu() + torch.randn(1 + vocab, vocab, generator=g)).to(device)
    rng = RngKey(*(t.to(device) for t in make_rng(batch)))

    def pair(rows: Tensor, parent_rank: int, depth: int) -> Tensor:
        at = rng._replace(position=rng.position + depth - 1)
        common: dict[str, Any] = {"sampling": Sampling(), "rng": at, "purpose": "draft"}
        if kind == "distinct":
            return sample(rows, num_samples=2, lane=parent_rank, **common).token_ids
        lanes = [0, 0] if kind == "shared lane" else [2 * parent_rank, 2 * parent_rank + 1]
        return torch.cat([sample(rows, lane=lane, **common).token_ids for lane in lanes], 1)

    top = pair(draft[0].expand(batch, vocab), 0, 1)
    below = [pair(draft[1 + top[:, i]], i, 2) for i in range(2)]
    ids = torch.cat([torch.full_like(top[:, :1], -1), top, *below], 1)
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 2], device=device).repeat(batch, 1)
    row = torch.cat([torch.zeros_like(top[:, :1]), 1 + top, *(1 + b for b in below)], 1)
    result = verify_tree(
        ids, parents, target[row], draft[row], max_depth=2, sampling=Sampling(), draft_sampling=Sampling(),
        rng=rng, rule=rule, replacement=replacement,
    )  # fmt: skip
    first, second = result.token_ids[:, 0], result.token_ids[:, 1]
    going = second >= 0  # a step that stopped after one token is completed by the target
    later = sample(
        target[1 + first], sampling=Sampling(), rng=rng._replace(position=rng.position + 100), purpose="target"
    ).token_ids[:, 0]
    counts = torch.bincount(first * vocab + torch.where(going, second, later), minlength=vocab**2)
    p = target.cpu().double().softmax(-1)
    return counts.cpu(), (p[0][:, None] * p[1:]).flatten()


@pytest.mark.parametrize(
    ("kind", "rule", "replacement"),
    [
        ("iid", "recursive", True),
        ("distinct", "recursive", False),
        ("distinct", "traversal", False),
        ("distinct", "match", False),
    ],
)
def test_steps_with_drawn_siblings_follow_the_target(
    backend: str, device: str, is_slow: bool, kind: str, rule: str, replacement: bool
) -> None:
    counts, distribution = _step(device, 600 if is_slow else 60_000, kind=kind, rule=rule, replacement=replacement)
    assert_distribution(counts, distribution, f"{rule} of {kind} siblings")


@pytest.mark.parametrize("kind", ["distinct", "shared lane"])
def test_g5_wrong_siblings_are_found_out(kind: str) -> None:
    """Draws without replacement under the rule for independent ones, and siblings that share their noise."""
    with use_backend("reference"):
        counts, distribution = _step("cpu", 60_000, kind=kind, rule="recursive", replacement=True)
    assert_biased(counts, distribution, kind)


@pytest.mark.parametrize("branches", [1, 2, 4])
def test_batch_sd_follows_the_target(backend: str, device: str, is_slow: bool, branches: int) -> None:
    """Constant rows, two tokens a branch: the first token, and one branch against verify_chain."""
    batch, vocab, g = 600 if is_slow else 40_000, 4, torch.Generator().manual_seed(2)
    p, q = torch.randn(vocab, generator=g).to(device), torch.randn(vocab, generator=g).to(device)
    rng = RngKey(*(t.to(device) for t in make_rng(batch)))
    drawn = [
        sample(
            q.expand(batch, vocab), sampling=Sampling(), rng=rng._replace(position=rng.position + i),
            purpose="draft", lane=branch,
        ).token_ids[:, 0]
        for branch in range(branches)
        for i in range(2)
    ]  # fmt: skip
    ids = torch.stack(drawn, 1).unflatten(1, (branches, 2))
    common: dict[str, Any] = {"sampling": Sampling(), "draft_sampling": Sampling(), "rng": rng}
    nodes = 1 + 2 * branches
    result = batch_sd(ids, p.expand(batch, nodes, -1), q.expand(batch, nodes, -1), **common)
    assert_distribution(
        torch.bincount(result.token_ids[:, 0].cpu(), minlength=vocab), p.cpu().double().softmax(0), "batch_sd"
    )
    assert int(result.status.max()) == 0
    if branches == 1:
        chain = verify_chain(ids[:, 0], p.expand(batch, 3, -1), q.expand(batch, 2, -1), **common)
        assert_same((result.token_ids, result.num_accepted), (chain.token_ids, chain.num_accepted), ("ids", "accepted"))
    else:
        nodes_taken = result.path[result.num_accepted == 2][:, :2]
        assert torch.equal(nodes_taken[:, 1], nodes_taken[:, 0] + 1)  # one branch, to its end


# --- whole streams: many steps on a constant model, ragged, as an engine would run them


def _stream(rule: str, *, sequences: int, length: int, has_step: bool = True) -> tuple[Tensor, Tensor]:
    """(counts, distribution) of the first `length` tokens; two of three ids on the first level, one below each."""
    table = constant_table(torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.15, 0.35, 0.5]))
    method = Procedure(rule, rule, (2, 1), "distinct", has_rows=rule != "match", has_step=has_step)
    tokens, _ = decode(method, table, {}, texts=sequences, length=length, seed=0)
    keys, distribution = joint_distribution(table, length, {})
    return joint_counts(tokens, table.vocab, keys), torch.cat([distribution, torch.zeros(1)])


@pytest.mark.parametrize("rule", ["recursive", "traversal", "match"])
def test_streams_of_trees_follow_the_target(rule: str) -> None:
    with use_backend("reference"):
        assert_distribution(*_stream(rule, sequences=20_000, length=4), rule)


def test_g3_the_recursive_rule_needs_no_step_and_traversal_does() -> None:
    with use_backend("reference"):
        assert_distribution(*_stream("recursive", sequences=20_000, length=4, has_step=False), "recursive")
        assert_biased(*_stream("traversal", sequences=100_000, length=4, has_step=False), "traversal")
