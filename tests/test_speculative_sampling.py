"""`speculative_sampling` in place of transformers' `_speculative_sampling`: same results, exact distribution."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import transformers
from check import assert_biased, assert_distribution
from exact_chains import chain_distribution
from torch import Tensor
from transformers.generation import candidate_generator, utils

from bench.samplers import transformers_gemma4
from specdec_loop import hf


def random_rows(rows: int, vocab: int, seed: int) -> Tensor:
    return 2 * torch.randn(1, rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_speculative_sampling_follows_the_distribution_by_enumeration() -> None:
    vocab, drafts, runs = 4, 2, 3000
    p, q = random_rows(drafts + 1, vocab, 0), random_rows(drafts, vocab, 1)
    p[0, 0, 3] = -float("inf")  # what the target forbids is never accepted
    distributions = p[0].double().softmax(-1), q[0].double().softmax(-1)
    expected: dict[tuple[int, ...], float] = {}
    for draft in itertools.product(range(vocab), repeat=drafts):
        weight = float(distributions[1][0, draft[0]] * distributions[1][1, draft[1]])
        for outcome, probability in chain_distribution(draft, *distributions, "ratio").items():
            expected[outcome] = expected.get(outcome, 0.0) + weight * probability
    outcomes = list(expected)
    counts = torch.zeros(len(outcomes))
    drawn = torch.stack([torch.multinomial(row.softmax(-1), runs, replacement=True) for row in q[0]], 1)
    for draft in drawn:
        tokens, matches = hf.speculative_sampling(torch.cat([torch.tensor([9]), draft])[None], q, drafts, p)
        assert tokens.shape == (1, int(matches) + 1) and matches.dim() == 0
        assert tokens[0, :-1].tolist() == draft[: int(matches)].tolist()
        counts[outcomes.index(tuple(tokens[0].tolist()))] += 1
    assert_distribution(counts, torch.tensor([expected[o] for o in outcomes]), "speculative_sampling")


def test_speculative_sampling_takes_what_transformers_gives() -> None:
    ids, target = torch.tensor([[3, 1, 2]]), torch.full((1, 3, 4), -float("inf"))
    target[0, [0, 1, 2], [1, 2, 3]] = 0.0
    tokens, matches = hf.speculative_sampling(ids, random_rows(2, 4, 0), 2, target)
    assert tokens.tolist() == [[1, 2, 3]] and int(matches) == 2
    tokens, matches = hf.speculative_sampling(ids, random_rows(2, 4, 0), 2, target, is_done_candidate=True)
    assert tokens.tolist() == [[1, 2]] and int(matches) == 1
    tokens, _ = hf.speculative_sampling(ids, random_rows(2, 4, 0), 2, target, assistant_ensemble_weight=0.5)
    assert tokens.shape[0] == 1
    # Nothing is left of the residual, because p = q: theirs divides 0 by 0, ours never rejects.
    assert int(hf.speculative_sampling(ids[:, :2], target[:, :1], 1, target[:, :2])[1]) == 1
    with pytest.raises(RuntimeError, match="row 0 of new_logits"):
        hf.speculative_sampling(ids, random_rows(2, 4, 0), 2, torch.full((1, 3, 4), float("nan")))


def gemma_distribution(row: Tensor, target: Tensor, runs: int) -> Tensor:
    """How often each token comes first when a Gemma-4 assistant drafts from `row`."""
    class_ = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    states = SimpleNamespace(hidden_states=[torch.zeros(1, 1, 1)], shared_kv_states={})
    counts = torch.zeros(len(row))
    assistant = transformers_gemma4.Gemma4AssistantForCausalLM(row)
    config = transformers.GenerationConfig(max_length=8)
    for _ in range(runs):
        generator = class_(assistant, torch.nn.Embedding(len(row), 1), config)
        ids, logits = generator.get_candidates(torch.zeros(1, 1, dtype=torch.int64), {}, states, False, 0)
        counts[utils._speculative_sampling(ids, logits, 1, target)[0][0, 0]] += 1
    return counts


@pytest.mark.skipif(transformers_gemma4.available() is not None, reason=str(transformers_gemma4.available()))
def test_a_gemma_4_assistant_gets_the_distribution_that_it_drafted_from() -> None:
    target = random_rows(2, 6, 2)
    row = target[0, 0] + 0.3 * torch.randn(6)
    want = target[0, 0].double().softmax(-1)
    with hf.patched():
        assert_distribution(gemma_distribution(row, target, 1000), want, "patched")
    assert_biased(gemma_distribution(row, target, 1000), want, "transformers alone")
