"""The theory against closed numbers, brute force and Monte Carlo."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from specdec_lab import theory

RATES = (0.0, 0.05, 0.3, 0.6, 0.8, 0.97, 1.0)


def distributions(count: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = torch.rand(2, count, vocab, generator=g, dtype=torch.float64) ** 2 + 1e-3
    return tuple(made / made.sum(-1, keepdim=True))  # type: ignore[return-value]


def markov(vocab: int, length: int, seed: int) -> theory.Markov:
    rows = distributions(1 + vocab * (length - 1), vocab, seed)[0] / 2 + 0.5 / vocab  # no id is rare
    return theory.Markov(rows[0], rows[1:].view(length - 1, vocab, vocab))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("draft", [0, 1, 4, 9])
def test_counts_agree_with_their_distribution_and_the_recursion(rate: float, draft: int) -> None:
    pmf = theory.accepted_distribution(rate, draft)
    assert pmf.sum().item() == pytest.approx(1)
    mean = (pmf * torch.arange(draft + 1)).sum().item()
    assert theory.expected_accepted(rate, draft).item() == pytest.approx(mean)
    assert theory.recursion(rate, draft).item() == pytest.approx(mean)
    assert theory.expected_tokens(rate, draft).item() == pytest.approx(mean + 1)


def test_counts_take_grids() -> None:
    rate, draft = torch.tensor([[0.8], [1.0]]), torch.tensor([0, 4])
    assert torch.allclose(theory.expected_accepted(rate, draft), torch.tensor([[0, 2.3616], [0, 4]]).double())
    assert theory.throughput(0.8, 4, 1.0, 10.0).item() == pytest.approx(3.3616 / 14)
    assert theory.operations(0.8, 4, 0.1).item() == pytest.approx(5.4 / 3.3616)


def test_the_optimal_draft_is_the_best_of_all() -> None:
    g = torch.Generator().manual_seed(1)
    rate, cost = torch.rand(2000, generator=g).double() * 0.98, torch.rand(2000, generator=g).double() * 0.9 + 0.01
    draft = torch.arange(400).double()
    speed = theory.speedup(rate[:, None], draft, cost[:, None])
    assert torch.equal(theory.optimal_draft(rate, cost), speed.argmax(1))
    real = theory.continuous_draft(rate, cost)
    around = theory.speedup(rate[:, None], real[:, None] + torch.tensor([-0.01, 0.0, 0.01]).double(), cost[:, None])
    inside = (real > 0.02) & (real < 399)
    assert bool((around[inside, 1:2] >= around[inside] - 1e-12).all())


@pytest.mark.parametrize(
    ("rate", "cost", "real", "whole"), [(0.3, 0.5, 0.0, 0), (1.0, 0.5, math.inf, 7), (0.5, 0.0, math.inf, 7)]
)
def test_limits_of_the_optimal_draft(rate: float, cost: float, real: float, whole: int) -> None:
    assert theory.continuous_draft(rate, cost).item() == real
    assert theory.optimal_draft(rate, cost, longest=7).item() == whole


CHAIN = (2 / 3, 10 / 9, 38 / 27, 130 / 81, 422 / 243, 1330 / 729)
BLOCK = (2 / 3, 11 / 9, 5 / 3, 166 / 81, 64 / 27, 1933 / 729)
IDEAL = (2 / 3, 4 / 3, 50 / 27, 64 / 27)


@pytest.mark.parametrize("length", range(1, 7))
def test_accepted_tokens_of_the_textbook_pair(length: int) -> None:
    p, q = torch.tensor([1.0, 2.0]).double() / 3, torch.tensor([2.0, 1.0]).double() / 3
    target, draft = (lambda _: p), (lambda _: q)
    assert theory.chain_accepted(target, draft, length) == pytest.approx(CHAIN[length - 1], abs=1e-12)
    assert theory.block_accepted(target, draft, length) == pytest.approx(BLOCK[length - 1], abs=1e-12)
    if length <= len(IDEAL):
        assert theory.ideal_accepted(target, draft, length) == pytest.approx(IDEAL[length - 1], abs=1e-12)


def test_a_block_keeps_a_prefix_as_often_as_its_weight_says() -> None:
    """P(tau >= i | x_1..x_i) = w_i: the coins of later places, which see what else was drafted, add up to it."""
    p, q = distributions(3, 3, 18)
    for prefix in itertools.product(range(3), repeat=1):
        kept = 0.0
        for rest in itertools.product(range(3), repeat=2):
            ids = torch.tensor([*prefix, *rest])
            w, h = theory.block_chances(p, q, ids)
            drawn = float(q[1, ids[1]] * q[2, ids[2]])
            kept += drawn * (1 - float((1 - h).prod()))
        assert kept == pytest.approx(float(w[1]))
    same = theory.block_chances(p, p, torch.tensor([0, 1, 2]))
    assert same[1].tolist() == [1, 1, 1]


def test_point_mass_drafts_gain_nothing_from_blocks() -> None:
    p, q = distributions(1, 4)[0][0], torch.tensor([0.0, 1.0, 0.0, 0.0]).double()
    chain = theory.chain_accepted(lambda _: p, lambda _: q, 4)
    assert theory.block_accepted(lambda _: p, lambda _: q, 4) == pytest.approx(chain)


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
    assert counts[0] == pytest.approx(theory.rejections(target, draft))
    assert counts[-1] > 0
    assert counts[-2] == pytest.approx(counts[-1], abs=1e-6)


def test_no_lossless_acceptance_rejects_less() -> None:
    p, q = distributions(200, 5, 7)
    accept = torch.rand(p.shape, dtype=torch.float64) * torch.minimum(torch.ones_like(p), p / q)  # b q <= p: lossless
    rejected = ((1 - accept) * q).sum(-1)
    assert bool((rejected >= theory.total_variation(p, q) - 1e-12).all())


def test_speculation_helps_where_drafts_are_accepted_more_often_than_they_cost() -> None:
    for rate, cost in itertools.product((0.1, 0.5, 0.9), (0.05, 0.5, 0.95)):
        assert theory.speedup(rate, 1, cost).item() == pytest.approx((1 + rate) / (1 + cost))
        assert (theory.optimal_draft(rate, cost).item() > 0) == (rate > cost)
    target, draft = markov(4, 5, 3), markov(4, 5, 4)
    assert theory.rejection_speedup(target, draft) == pytest.approx(5 / theory.rejections(target, draft))
    assert theory.rejection_speedup(target, target) == math.inf


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


def test_the_residual_of_theorem_4_attains_its_loss_and_no_other_does_better() -> None:
    p, q = distributions(50, 5, 14)
    accept = torch.rand(p.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left = (p - accept * q).clamp(min=0)
    best = theory.output_distribution(q, accept, left / left.sum(-1, keepdim=True))
    torch.testing.assert_close(theory.total_variation(best, p), theory.loss(p, q, accept))
    other = theory.output_distribution(q, accept, distributions(50, 5, 15)[0])
    assert bool((theory.total_variation(other, p) >= theory.loss(p, q, accept) - 1e-12).all())
    for epsilon in (0.0, 0.1):  # over-acceptance leaves the residual as it is
        over = ((p + epsilon) / q).clamp(max=1)
        left, plain = (p - over * q).clamp(min=0), (p - q).clamp(min=0)
        torch.testing.assert_close(left / left.sum(-1, keepdim=True), plain / plain.sum(-1, keepdim=True))
        output = theory.output_distribution(q, over, plain / plain.sum(-1, keepdim=True))
        torch.testing.assert_close(theory.total_variation(output, p), theory.over_acceptance(p, q, epsilon).bias)


def test_lenient_acceptance_stays_below_its_bound() -> None:
    p, q = distributions(50, 5, 16)
    for lenience in (0.2, 0.7, 1.0):
        found = theory.lenient(p, q, lenience)
        torch.testing.assert_close(found.distribution.sum(-1), torch.ones(50, dtype=torch.float64))
        assert bool((found.distribution <= p / lenience + 1e-12).all())
        assert bool((found.accepted >= 1 - theory.total_variation(p, q) - 1e-12).all())
    torch.testing.assert_close(theory.lenient(p, q, 1.0).distribution, p)


def test_toys_of_batch_decoding() -> None:
    assert theory.bernoulli_improvement(0.9, 0.3, 5) == pytest.approx(0.20634)
    assert theory.uniform_improvement(2.0, 3) == pytest.approx(0.375)
    start = lambda u: theory.Markov(torch.tensor([u, 1 - u], dtype=torch.float64), torch.zeros(0, 2, 2).double())  # noqa: E731
    for u, v, m in itertools.product((0.2, 0.9), (0.3, 0.7), (1, 3)):
        gain = theory.rejections(start(v), start(u)) - theory.batch_rejections(start(v), start(u), m)
        assert gain == pytest.approx(theory.bernoulli_improvement(u, v, m), abs=1e-12)


def test_over_acceptance_lies_on_the_front() -> None:
    p, q = torch.tensor([0.2, 0.3, 0.1, 0.4]).double(), torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
    points = [theory.over_acceptance(p, q, e) for e in (0.0, 0.1, 0.2, 0.4)]
    assert torch.stack([x.rejected for x in points]).tolist() == pytest.approx([0.35, 0.2, 0.1, 0.0])
    assert torch.stack([x.bias for x in points]).tolist() == pytest.approx([0.0, 0.15, 0.25, 0.35])
    assert torch.stack([x.bias_target for x in points]).tolist() == pytest.approx([0.21, 0.27, 0.31, 0.35])
    rows_p, rows_q = distributions(100, 6, 8)
    for epsilon in (0.0, 0.05, 0.3):
        point = theory.over_acceptance(rows_p, rows_q, epsilon)
        assert torch.allclose(point.rejected + point.bias, theory.total_variation(rows_p, rows_q))
        accept = ((rows_p + epsilon) / rows_q).clamp(max=1)
        assert torch.allclose(theory.loss(rows_p, rows_q, accept), point.bias)


def test_rules_for_sets_stay_below_the_ceiling() -> None:
    p, q = distributions(30, 5, 9)
    for count in (1, 2, 3):
        top = theory.ceiling(p, q, count)
        recursive = theory.with_replacement(p, q, count)
        assert bool((recursive <= top + 1e-12).all())
        for row in range(len(p)):
            assert theory.k_sequential(p[row], q[row], count)[0] <= float(top[row]) + 1e-9
            subsets = itertools.chain.from_iterable(itertools.combinations(range(5), r) for r in range(6))
            brute = min(float(p[row, list(h)].sum() + 1 - q[row, list(h)].sum() ** count) for h in subsets)
            assert float(top[row]) == pytest.approx(brute, abs=1e-12)
    single = 1 - theory.total_variation(p, q)
    for value in (theory.with_replacement(p, q, 1), theory.ceiling(p, q, 1), theory.greedy_multi_draft(p, q, 1)):
        assert torch.allclose(value, single)
    assert theory.without_replacement(p[0], q[0], 1) == pytest.approx(float(single[0]))


def test_the_ceiling_of_any_distribution_of_sets() -> None:
    p, q = (x[0] for x in distributions(1, 4, 17))
    independent: dict[tuple[int, ...], float] = {}
    distinct: dict[tuple[int, ...], float] = {}
    for a, b in itertools.product(range(4), repeat=2):
        independent[a, b] = float(q[a] * q[b])
        if a != b:
            distinct[a, b] = float(q[a] * q[b] / (1 - q[a]))
    assert theory.set_ceiling(p, independent) == pytest.approx(float(theory.ceiling(p, q, 2)))
    assert theory.without_replacement(p, q, 2) <= theory.set_ceiling(p, distinct) + 1e-12
    assert theory.set_ceiling(p, {(0, 2): 1.0}) == pytest.approx(float(theory.set_acceptance(p, torch.tensor([0, 2]))))
    best, rest = int(q.argmax()), q.index_fill(0, q.argmax(), 0.0)
    mixed = {(best, x): float(rest[x] / rest.sum()) for x in range(4) if x != best}
    assert theory.set_ceiling(p, mixed) == pytest.approx(float(theory.greedy_multi_draft(p, q, 2)))


def test_acceptance_of_sets_by_simulation() -> None:
    p, q = (x[0] for x in distributions(1, 4, 11))
    g, runs, count = torch.Generator().manual_seed(0), 200_000, 2
    coin = torch.rand(runs, count, generator=g, dtype=torch.float64)
    drawn = torch.multinomial(q.expand(runs, 4), 2, generator=g)
    second = torch.multinomial(q, runs, replacement=True, generator=g)
    left = (p - q).clamp(min=0)
    left = left / left.sum()
    first = coin[:, 0] * q[drawn[:, 0]] < p[drawn[:, 0]]
    with_ = first | (coin[:, 1] * q[second] < left[second])
    without_q = q[drawn[:, 1]] / (1 - q[drawn[:, 0]])
    without = first | (coin[:, 1] * without_q < left[drawn[:, 1]])
    error = 5 * math.sqrt(0.25 / runs)
    assert float(with_.double().mean()) == pytest.approx(float(theory.with_replacement(p, q, 2)), abs=error)
    assert float(without.double().mean()) == pytest.approx(theory.without_replacement(p, q, 2), abs=error)


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
@pytest.mark.parametrize("nodes", [1, 2, 4, 5])
def test_the_best_tree_is_the_best_of_all(acceptance: list[float], nodes: int) -> None:
    parents, value = theory.best_tree(acceptance, nodes, 2)
    assert value == pytest.approx(brute_tree(acceptance, nodes, 2))
    rank = [sum(parents[m] == parents[n] for m in range(1, n)) for n in range(len(parents))]
    weight = [1.0]
    for n in range(1, len(parents)):
        weight.append(weight[parents[n]] * acceptance[rank[n]])
    assert sum(weight) == pytest.approx(value)
    with pytest.raises(ValueError, match="best_tree"):
        theory.best_tree([1.5], 3)


@pytest.mark.parametrize("cost", [0.0, 0.3])
def test_the_fastest_tree_is_the_fastest_of_all_sizes_and_depths(cost: float) -> None:
    def verify(nodes: int) -> float:
        return 1 + cost * nodes

    parents, tokens, time = theory.fastest_tree([0.6, 0.3], 6, 0.2, verify)
    every = [
        (depth * 0.2 + verify(nodes)) / theory.best_tree([0.6, 0.3], nodes, depth)[1]
        for nodes in range(1, 7)
        for depth in range(nodes)
    ]
    assert time == pytest.approx(min(every))
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    assert (max(depth) * 0.2 + verify(len(parents))) / tokens == pytest.approx(time)


def test_coupled_races() -> None:
    p, q = (x[0] for x in distributions(1, 5, 12))
    g, runs = torch.Generator().manual_seed(0), 400_000
    noise = torch.empty(runs, 3, 5, dtype=torch.float64).exponential_(generator=g)
    winner = (noise[:, 0] / p).argmin(1)
    match = float((winner == (noise[:, 0] / q).argmin(1)).double().mean())
    error = 5 * math.sqrt(0.25 / runs)
    assert match == pytest.approx(float(theory.match_probability(p, q)), abs=error)
    low, high = theory.match_bounds(p, q)
    assert low - 1e-12 <= theory.match_probability(p, q) <= high + 1e-12
    assert float(theory.minhash_match(p, q)) == pytest.approx(float(low))
    assert low - 1e-12 <= theory.match_floor(p, q) <= theory.match_probability(p, q) + 1e-12
    listed = (noise.amin(1) / p).argmin(1)[:, None] == (noise / q).argmin(2)
    assert float(listed.any(1).double().mean()) >= float(theory.list_match_bound(p, q, 3)) - error
    assert theory.match_probability(p, p).item() == pytest.approx(1)
