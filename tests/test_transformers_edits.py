"""Edits beside the logits processors of transformers: one row after another, in chains and in trees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specdec_kernels import Edits, TokenCounts, count_tokens, edit_rows

VOCAB, PROMPT = 60, 8
STOPS, WORDS = [3, 9], [[5], [7, 8], [1, 2, 4]]


def processors(bias: dict[int, float], penalty: float, least: int) -> LogitsProcessorList:
    """In the order of `generate`."""
    return LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(penalty),
            NoBadWordsLogitsProcessor(WORDS, eos_token_id=STOPS),
            MinNewTokensLengthLogitsProcessor(PROMPT, least, STOPS),
        ]
    )


def request(g: torch.Generator) -> tuple[Tensor, Tensor, Edits, LogitsProcessorList]:
    """A prompt, what was generated, and the request's parameters in both forms."""
    prompt, output = (torch.randint(0, VOCAB, (n,), generator=g) for n in (PROMPT, 5))
    bias = {int(x): float(v) for x, v in zip(torch.randperm(VOCAB, generator=g)[:6], torch.randn(6), strict=True)}
    penalty, least = 0.7 + float(torch.rand((), generator=g)), int(torch.randint(0, 9, (), generator=g))
    counts = TokenCounts.empty(1, VOCAB)
    count_tokens(counts, prompt[None], is_prompt=True)
    count_tokens(counts, output[None])
    words = torch.full((1, len(WORDS), 3), -1, dtype=torch.int32)
    for row, word in zip(words[0], WORDS, strict=True):
        row[3 - len(word) :] = torch.tensor(word)
    edits = Edits(
        bias_ids=torch.tensor([list(bias)], dtype=torch.int32), bias=torch.tensor([list(bias.values())]),
        repetition=torch.tensor([penalty]), counts=counts, stop_ids=torch.tensor([STOPS], dtype=torch.int32),
        min_tokens=torch.tensor([least - 5], dtype=torch.int32), bad_words=words, tail=output[None, -2:].int(),
    )  # fmt: skip
    return prompt, output, edits, processors(bias, penalty, least)


@pytest.mark.parametrize("seed", range(12))
def test_chains_get_the_logits_of_transformers(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    prompt, output, edits, theirs = request(g)
    drafts = torch.randint(0, 10 if seed % 2 else VOCAB, (1, 6), generator=g)
    logits = 3 * torch.randn(7, VOCAB, generator=g)
    ours = edit_rows(edits, drafts, vocab=VOCAB).apply(logits)
    for i in range(7):
        text = torch.cat([prompt, output, drafts[0, :i]])[None]
        torch.testing.assert_close(ours[i : i + 1], theirs(text, logits[i : i + 1]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_trees_get_the_logits_of_transformers(seed: int) -> None:
    g = torch.Generator().manual_seed(100 + seed)
    prompt, output, edits, theirs = request(g)
    parents = torch.tensor([[-1, *(int(torch.randint(0, n, (), generator=g)) for n in range(1, 12))]])
    ids = torch.randint(0, 10 if seed % 2 else VOCAB, (1, 12), generator=g)
    logits = 3 * torch.randn(12, VOCAB, generator=g)
    ours = edit_rows(edits, ids, vocab=VOCAB, parents=parents).apply(logits)
    for node in range(12):
        path, n = [], node
        while n > 0:
            path, n = [int(ids[0, n]), *path], int(parents[0, n])
        text = torch.cat([prompt, output, torch.tensor(path, dtype=torch.int64)])[None]
        torch.testing.assert_close(ours[node : node + 1], theirs(text, logits[node : node + 1]), rtol=0, atol=1e-5)
