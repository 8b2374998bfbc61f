"""Losslessness over whole streams, and the twins that must fail: a sampler broken in each known way is found.

False-alarm rate of each test: 1e-6 (tests/check.py). Numbers G1 to G7 are the global rules of docs/design.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from check import assert_biased, assert_distribution
from torch import Tensor

from specdec_kernels import RngKey, Sampling, sample, use_backend, verify_chain
from specdec_lab.lossless.exact import constant_table, joint_counts, joint_distribution
from specdec_lab.lossless.experiments import decode
from specdec_lab.lossless.faults import confident
from specdec_lab.lossless.procedures import PROCEDURES, Procedure, Step
from specdec_lab.lossless.tradeoff import Over

P, Q = torch.tensor([1 / 3, 2 / 3]).double(), torch.tensor([2 / 3, 1 / 3]).double()
TABLE, LENGTH, SEQUENCES = constant_table(P, Q), 6, 60_000
BY_NAME = {method.name: method for method in PROCEDURES}


def _check(verdict, rule: str, device: str = "cpu", table=TABLE, length: int = LENGTH, **broken) -> None:  # type: ignore[no-untyped-def]
    """Texts of a method with some of its fields changed."""
    method = replace(BY_NAME[rule], **broken)
    tokens, _ = decode(method, table, {}, texts=SEQUENCES, length=length, seed=0, device=device)
    keys, distribution = joint_distribution(table, length, {})
    counts = joint_counts(tokens, table.vocab, keys)
    verdict(counts, torch.cat([distribution, torch.zeros(1)]), f"{rule} {broken}")


@pytest.mark.parametrize("rule", ["ratio", "block", "match"])
def test_streams_of_six_tokens_follow_the_target(fast_backend: str, rule: str) -> None:
    _check(assert_distribution, rule, device="cuda" if fast_backend == "cuda" else "cpu")


def test_g1_argmax_drafts_scored_with_the_full_draft_distribution_are_biased() -> None:
    _check(assert_biased, "ratio", drawn={"temperature": 0.0})


def test_g1_drafts_scored_with_another_temperature_are_biased() -> None:
    _check(assert_biased, "ratio", drawn={"temperature": 0.8})


def test_g2_drafts_that_share_the_residual_noise_are_biased() -> None:
    """On eight tokens: the residual reuses the race the draft lost."""
    g = torch.Generator().manual_seed(3)
    p, q = torch.randn(8, generator=g).softmax(0).double(), torch.randn(8, generator=g).softmax(0).double()
    for purpose, verdict in (("draft", assert_distribution), ("residual", assert_biased)):
        _check(verdict, "ratio", table=constant_table(p, q), length=1, widths=(1,), purpose=purpose)


def test_g3_block_verification_without_a_step_is_biased() -> None:
    _check(assert_biased, "block", has_step=False)


def test_g3_the_token_rule_needs_no_step() -> None:
    _check(assert_distribution, "ratio", has_step=False)


def test_g4_a_length_that_looks_at_the_drafted_id_is_biased() -> None:
    _check(assert_biased, "ratio", keep=confident)


def test_g4_a_length_that_does_not_look_is_free() -> None:
    def every_third(method: Procedure, step: Step) -> Tensor:
        ids = step.token_ids
        slot = torch.arange(len(ids), device=ids.device)[:, None]
        return torch.arange(ids.shape[1], device=ids.device) < slot % 3

    _check(assert_distribution, "ratio", keep=every_third)


def test_g7_a_coin_compared_with_less_or_equal_emits_impossible_tokens() -> None:
    """Coin 0 at a token of target probability zero: `<=` accepts it, the strict comparison does not."""
    seed, position = 1, 1012415  # coin is exactly 0
    rng = RngKey(torch.tensor([seed]), torch.tensor([position]))
    coin, p, q = 0.0, 0.0, 0.5
    assert coin * q <= p
    rows = torch.tensor([[[0.0, -torch.inf], [0.0, 0.0]]])
    result = verify_chain(
        torch.tensor([[1]]), rows, torch.zeros(1, 1, 2), sampling=Sampling(), draft_sampling=Sampling(), rng=rng
    )
    assert result.num_accepted.tolist() == [0] and result.token_ids[0, 0] == 0


def test_a_residual_that_forgets_the_draft_is_found() -> None:
    """Decoding-UNO (rejected tokens drawn from the target) is biased; so is any sampler that skips the residual."""

    _check(assert_biased, "ratio", verify=Over(0.0, "target"))


def test_over_acceptance_is_biased_by_exactly_what_the_theory_says() -> None:
    """Yin et al., Theorem 5 (p target here): P(rej) = sum (q - p - eps)+, bias = sum min((q - p)+, eps)."""
    epsilon, batch = 0.1, 400_000
    logits = P.log().float().expand(batch, 2, 2)
    drafted = Q.log().float().expand(batch, 1, 2)
    rng = RngKey(torch.arange(batch), torch.zeros(batch, dtype=torch.int64))
    ids = sample(drafted[:, 0], sampling=Sampling(), rng=rng, purpose="draft").token_ids
    result = verify_chain(
        ids, logits, drafted, sampling=Sampling(), draft_sampling=Sampling(), rng=rng, over_acceptance=epsilon
    )
    over = (Q - P).clamp(min=0)
    rejected = 1 - float(result.num_accepted.double().mean())
    first = torch.bincount(result.token_ids[:, 0], minlength=2).double() / batch
    sigma = 0.5 / batch**0.5
    assert abs(rejected - float((over - epsilon).clamp(min=0).sum())) < 5 * sigma
    assert abs(0.5 * float((first - P).abs().sum()) - float(over.clamp(max=epsilon).sum())) < 5 * sigma


def test_first_tokens_over_128256_ids_follow_the_target(fast_backend: str) -> None:
    """Chi-square of 40,000 tokens over the vocabulary, rare ids pooled; false-alarm rate 1e-6."""
    if fast_backend == "reference":
        pytest.skip(
            "the reference draws 128256 ids a row in plain PyTorch: minutes; its distribution is enumerated elsewhere"
        )
    vocab, rounds, batch = 128_256, 40, 1000
    device = "cuda" if fast_backend == "cuda" else "cpu"
    g = torch.Generator().manual_seed(8)
    row = 3.5 * torch.randn(vocab, generator=g)
    drafted = row + 0.8 * torch.randn(vocab, generator=g)
    p = (row.double() / 0.9).softmax(0)
    sampling = Sampling.full(batch, temperature=0.9, device=device)
    counts = torch.zeros(vocab)
    target = row.to(device).expand(batch, 2, vocab)
    draft = drafted.to(device).expand(batch, 1, vocab)
    for i in range(rounds):
        seed = torch.arange(i * batch, (i + 1) * batch, device=device)
        rng = RngKey(seed, torch.zeros_like(seed))
        ids = sample(draft[:, 0], sampling=sampling, rng=rng, purpose="draft").token_ids
        result = verify_chain(ids, target, draft, sampling=sampling, draft_sampling=sampling, rng=rng)
        counts += torch.bincount(result.token_ids[:, 0].cpu(), minlength=vocab)
    assert_distribution(counts, p, "first tokens")
    tilted = p * torch.exp(0.1 * torch.sign(drafted - row))
    assert_biased(counts, tilted / tilted.sum(), "a distribution tilted by a tenth towards the draft")


def test_reference_and_default_backend_draw_the_same_stream() -> None:
    mine, _ = decode(BY_NAME["ratio"], TABLE, {}, texts=500, length=LENGTH, seed=0)
    with use_backend("reference"):
        theirs, _ = decode(BY_NAME["ratio"], TABLE, {}, texts=500, length=LENGTH, seed=0)
    assert torch.equal(mine, theirs)
