"""The distributions themselves, by enumeration, and the ops against them: a wrong formula fails here on any backend."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import FILTERS, make_rng
from check import assert_distribution
from exact_chains import chain_distribution, joint_error, processed
from torch import Tensor

from specdec_kernels import RngKey, Sampling, acceptance_ratios, residual_probs, verify_chain


def _tables(vocab: int, length: int, filters: dict[str, float], seed: int) -> dict[tuple[int, ...], Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        ids: processed(2 * torch.randn(vocab, generator=g), **filters)  # type: ignore[arg-type]
        for n in range(length + 1)
        for ids in itertools.product(range(vocab), repeat=n)
    }


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rule", ["ratio", "block", "match"])
def test_lossless_rules_give_the_target_joint_distribution_by_enumeration(rule: str, filters: str) -> None:
    p = _tables(4, 3, FILTERS[filters], seed=1)
    q = _tables(4, 3, FILTERS[filters], seed=2)
    assert joint_error(rule, p, q, vocab=4, draft=3) < 1e-12


def test_token_rule_where_block_is_expected_is_caught_by_the_enumeration() -> None:
    """The twin: a distribution that keeps the residual of the wrong rule is not the target's."""
    p, q = _tables(3, 2, {}, seed=3), _tables(3, 2, {}, seed=4)
    wrong = {ids: row.flip(0) for ids, row in q.items()}  # verified against a distribution the drafts did not come from
    joint = 0.0
    for ids in itertools.product(range(3), repeat=2):
        weight = float(q[()][ids[0]] * q[ids[:1]][ids[1]])
        rows_p, rows_q = torch.stack([p[()], p[ids[:1]], p[ids]]), torch.stack([wrong[()], wrong[ids[:1]]])
        joint += weight * sum(v for k, v in chain_distribution(ids, rows_p, rows_q, "ratio").items() if k[0] == 0)
    assert abs(joint - float(p[()][0])) > 1e-2


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rule", ["ratio", "block", "match", "typical"])
def test_frequencies_follow_the_exact_distribution_of_the_draft(
    backend: str, device: str, is_slow: bool, rule: str, filters: str
) -> None:
    vocab, draft, batch = 6, 2, 600 if is_slow else 60_000
    g = torch.Generator().manual_seed(11)
    target = 1.5 * torch.randn(draft + 1, vocab, generator=g)
    drafted = 0.8 * target[:draft] + torch.randn(draft, vocab, generator=g)
    options = FILTERS[filters]
    p = torch.stack([processed(row, **options) for row in target])  # type: ignore[arg-type]
    q = torch.stack([processed(row, **options) for row in drafted])  # type: ignore[arg-type]
    ids = [int(row.argmax()) for row in q]
    if rule == "match":  # deterministic drafts
        q = torch.nn.functional.one_hot(torch.tensor(ids), vocab).double()
    distribution = chain_distribution(ids, p, q, rule)
    sampling = Sampling.full(batch, device=device, **options)  # type: ignore[arg-type]
    rng = RngKey(*(t.to(device) for t in make_rng(batch)))
    result = verify_chain(
        torch.tensor(ids, device=device).repeat(batch, 1),
        target.to(device).expand(batch, -1, -1),
        None if rule == "match" else drafted.to(device).expand(batch, -1, -1),
        sampling=sampling,
        draft_sampling=sampling,
        rng=rng,
        rule=rule,
    )
    assert int(result.status.sum()) == 0
    seen: dict[tuple[int, ...], int] = {}
    for row in result.token_ids.tolist():
        key = tuple(t for t in row if t >= 0)
        seen[key] = seen.get(key, 0) + 1
    keys = sorted(set(distribution) | set(seen))
    counts = torch.tensor([seen.get(k, 0) for k in keys])
    assert_distribution(counts, torch.tensor([distribution.get(k, 0.0) for k in keys]), f"{rule}, {filters}")


@pytest.mark.parametrize("filters", FILTERS)
def test_ratios_and_residuals_equal_their_formulas(backend: str, device: str, filters: str) -> None:
    vocab, batch = 37, 8
    options = FILTERS[filters]
    g = torch.Generator().manual_seed(5)
    target, drafted = 2 * torch.randn(batch, 2, vocab, generator=g), 2 * torch.randn(batch, 1, vocab, generator=g)
    p = torch.stack([processed(row[0], **options) for row in target])  # type: ignore[arg-type]
    q = torch.stack([processed(row[0], **options) for row in drafted])  # type: ignore[arg-type]
    ids = q.argmax(1, keepdim=True)
    sampling = Sampling.full(batch, device=device, **options)  # type: ignore[arg-type]
    both = {"sampling": sampling, "draft_sampling": sampling}
    found = acceptance_ratios(ids.to(device), target.to(device), drafted.to(device), **both)
    want = (p.gather(1, ids) / q.gather(1, ids)).clamp(max=1)
    torch.testing.assert_close(found.ratio.cpu().double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.overlap.cpu().double()[:, 0], torch.minimum(p, q).sum(1), rtol=1e-5, atol=1e-6)
    for a, b in ((1.0, 1.0), (0.6, 1.0), (1.0, 0.0), (1.0, 1.7)):
        weight = (a * p - b * q).clamp(min=0)
        probs, mass, status = residual_probs(target[:, 0].to(device), drafted[:, 0].to(device), a=a, b=b, **both)
        assert int(status.sum()) == 0
        torch.testing.assert_close(mass.cpu().double(), weight.sum(1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(probs.cpu().double(), weight / weight.sum(1, keepdim=True), rtol=1e-4, atol=2e-6)
