"""The theory against closed numbers, brute force and Monte Carlo."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from specdec_lab import theory
from specdec_lab.lossless.acceptance import block_accepted


def distributions(count: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = torch.rand(2, count, vocab, generator=g, dtype=torch.float64) ** 2 + 1e-3
    return tuple(made / made.sum(-1, keepdim=True))  # type: ignore[return-value]


def markov(vocab: int, length: int, seed: int) -> theory.Markov:
    rows = distributions(1 + vocab * (length - 1), vocab, seed)[0] / 2 + 0.5 / vocab  # no id is rare
    return theory.Markov(rows[0], rows[1:].view(length - 1, vocab, vocab))


BLOCK = (2 / 3, 11 / 9, 5 / 3, 166 / 81, 64 / 27, 1933 / 729)


@pytest.mark.parametrize("length", range(1, 7))
def test_a_block_of_the_textbook_pair(length: int) -> None:
    p, q = torch.tensor([[1.0, 2.0]]).double() / 3, torch.tensor([[2.0, 1.0]]).double() / 3
    same = torch.zeros(1, 2, dtype=torch.int64)
    assert block_accepted(p, q, same, length) == pytest.approx(BLOCK[length - 1], abs=1e-12)


def test_point_mass_drafts_gain_nothing_from_blocks() -> None:
    p, q = distributions(1, 4)[0], torch.tensor([[0.0, 1.0, 0.0, 0.0]]).double()
    chain = sum(float(p[0, 1]) ** k for k in range(1, 5))
    assert block_accepted(p, q, torch.zeros(1, 4, dtype=torch.int64), 4) == pytest.approx(chain)


def test_a_block_follows_the_contexts() -> None:
    """Two drafts of two ids: E[A] = sum q(x) w(x) + sum q(x) q(y | x) w(x, y), by hand."""
    p, q = distributions(3, 2, 19)
    after = torch.tensor([[1, 2], [0, 0], [0, 0]])
    want = 0.0
    for x in range(2):
        w = min(1.0, float(p[0, x] / q[0, x]))
        row = after[0, x]
        joint = sum(float(q[row, y]) * min(1.0, w * float(p[row, y] / q[row, y])) for y in range(2))
        want += float(q[0, x]) * (w + joint)
    assert block_accepted(p, q, after, 2) == pytest.approx(want)


def simulated_rejections(target: theory.Markov, draft: theory.Markov, drafts: int, runs: int, seed: int) -> float:
    """Algorithm 4, run by run in plain Python."""
    g = torch.Generator().manual_seed(seed)
    length, count = len(target.steps) + 1, 0
    uniform = iter(torch.rand(runs * length * (2 * drafts * length + 4), generator=g).tolist())

    def draw(distribution: list[float]) -> int:
        u = next(uniform) * sum(distribution)
        for x, weight in enumerate(distribution):
            u -= weight
            if u < 0:
                return x
        return max(range(len(distribution)), key=distribution.__getitem__)

    p_rows = [target.rows(n).tolist() for n in range(1, length + 1)]
    q_rows = [draft.rows(n).tolist() for n in range(1, length + 1)]
    for _ in range(runs):
        text: list[int] = []
        while len(text) < length:
            batch = []
            for _ in range(drafts):
                path: list[int] = []
                for n in range(len(text), length):
                    before = (text + path)[-1] if n else 0
                    path.append(draw(q_rows[n][before]))
                batch.append(path)
            n, before = len(text), text[-1] if text else 0
            distribution, q, hit = p_rows[n][before], q_rows[n][before], None
            for path in batch:
                if next(uniform) * q[path[0]] < distribution[path[0]]:
                    hit = path
                    break
                left = [max(a - b, 0.0) for a, b in zip(distribution, q, strict=True)]
                distribution = [a / sum(left) for a in left]
            if hit is None:
                text.append(draw(distribution))
                count += 1
                continue
            text.append(hit[0])
            for x in hit[1:]:
                n, before = len(text), text[-1]
                distribution, q = p_rows[n][before], q_rows[n][before]
                if next(uniform) * q[x] < distribution[x]:
                    text.append(x)
                    continue
                text.append(draw([max(a - b, 0.0) for a, b in zip(distribution, q, strict=True)]))
                count += 1
                break
    return count / runs


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_theorems_1_and_3_against_the_algorithm(drafts: int) -> None:
    target, draft = markov(4, 5, 3), markov(4, 5, 4)
    runs = 4000
    error = 5 * math.sqrt(5 / runs)  # at most one rejection a token: five standard errors of a sum of five
    want = theory.batch_rejections(target, draft, drafts)
    assert simulated_rejections(target, draft, drafts, runs, drafts) == pytest.approx(want, abs=error / 2)


def test_rejections_fall_with_drafts_to_a_positive_limit() -> None:
    target, draft = markov(7, 50, 5), markov(7, 50, 6)
    counts = [theory.batch_rejections(target, draft, m) for m in (1, 2, 4, 5, 1000, math.inf)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] > 0
    assert counts[-2] == pytest.approx(counts[-1], abs=1e-6)


def test_no_lossless_acceptance_rejects_less() -> None:
    p, q = distributions(200, 5, 7)
    accept = torch.rand(p.shape, dtype=torch.float64) * torch.minimum(torch.ones_like(p), p / q)  # b q <= p: lossless
    rejected = ((1 - accept) * q).sum(-1)
    assert bool((rejected >= theory.total_variation(p, q) - 1e-12).all())


def test_what_several_tries_leave_is_the_iterated_definition_and_their_sum_is_the_target() -> None:
    p, q = distributions(20, 6, 13)
    left, missed, distribution = p, torch.ones(20, dtype=torch.float64), torch.zeros_like(p)
    for tries in range(1, 5):
        distribution = distribution + missed[:, None] * torch.minimum(left, q)
        variation = theory.total_variation(left, q)
        missed, left = missed * variation, (left - q).clamp(min=0) / variation[:, None]
        mass, residual = theory.residuals(p, q, tries)
        torch.testing.assert_close(mass, missed)
        seen = missed > 1e-6  # of what is hardly left, the direction is rounding
        torch.testing.assert_close(residual[seen], left[seen], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(distribution + mass[:, None] * residual, p)


def test_rejections_of_one_bernoulli_token() -> None:
    """With M drafts |u - v| (1 - w^(M - 1)) fewer, w the draft's probability of the symbol that it drafts too often."""
    start = lambda u: theory.Markov(torch.tensor([u, 1 - u], dtype=torch.float64), torch.zeros(0, 2, 2).double())  # noqa: E731
    for u, v, m in itertools.product((0.2, 0.9), (0.3, 0.7), (1, 3)):
        gain = theory.batch_rejections(start(v), start(u), 1) - theory.batch_rejections(start(v), start(u), m)
        w = u if u >= v else 1 - u
        assert gain == pytest.approx(abs(u - v) * (1 - w ** (m - 1)), abs=1e-12)


def brute_tree(acceptance: list[float], nodes: int, depth: int) -> float:
    """Best total of all sets of paths that are closed under parents and elder siblings."""
    paths = [p for d in range(1, depth + 1) for p in itertools.product(range(len(acceptance)), repeat=d)]
    best = 0.0
    for chosen in itertools.combinations(paths, nodes - 1):
        held = {(), *chosen}
        if all(p[:-1] in held and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in held) for p in chosen):
            best = max(best, sum(math.prod(acceptance[r] for r in p) for p in chosen))
    return 1 + best


@pytest.mark.parametrize("acceptance", [[0.6, 0.3], [0.2, 0.7], [0.5, 0.1, 0.3]])
@pytest.mark.parametrize("cost", [0.0, 0.3])
def test_the_fastest_tree_is_the_fastest_of_all_sizes_and_depths(acceptance: list[float], cost: float) -> None:
    def verify(nodes: int) -> float:
        return 1 + cost * nodes

    parents, tokens, time = theory.fastest_tree(acceptance, 5, 0.2, verify, deepest=2)
    every = [
        (depth * 0.2 + verify(nodes)) / brute_tree(acceptance, nodes, depth)
        for nodes in range(1, 6)
        for depth in range(min(nodes, 3))
        if nodes == 1 or depth
    ]
    assert time == pytest.approx(min(every))
    depth, weight = [0], [1.0]
    for n, parent in enumerate(parents[1:], 1):
        depth.append(depth[parent] + 1)
        weight.append(weight[parent] * acceptance[parents[1:n].count(parent)])
    assert sum(weight) == pytest.approx(tokens)
    assert (max(depth) * 0.2 + verify(len(parents))) / tokens == pytest.approx(time)
    with pytest.raises(ValueError, match="fastest_tree"):
        theory.fastest_tree([1.5], 3, 0.2, verify)
