"""Edits in the loop: the text of plain decoding with every drafter, and the processors of transformers as edits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import model
from texts import assert_same, prompts
from transformers.generation import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specdec_kernels import Edits, Sampling, TokenCounts
from specdec_loop import DraftModel, Lookahead, PromptLookup, SuffixDecoding, generate, hf
from specdec_loop.hf.processors import split_edits

INF = float("inf")
STARTS = prompts(3)
BATCH = len(STARTS)
ALL: dict[str, Any] = {
    "repetition_penalty": 1.4, "bad_words_ids": [[5], [7, 8], [1, 2, 3]], "min_new_tokens": 6, "eos_token_id": 4,
    "sequence_bias": [[[9], 2.5], [[11], -4.0]], "suppress_tokens": [13, 17],
}  # fmt: skip


def edits() -> Edits:
    """Penalties, biases and bans that change most tokens of these texts."""
    one = torch.ones(BATCH)
    ids = torch.tensor([[3, 5, 9]] * BATCH, dtype=torch.int32)
    return Edits(
        bias_ids=ids, bias=torch.tensor([[1.5, -1.0, -torch.inf]] * BATCH), repetition=1.3 * one, frequency=0.4 * one,
        presence=0.3 * one, stop_ids=ids[:, :1].contiguous(), min_tokens=torch.arange(BATCH, dtype=torch.int32) * 4,
        bad_words=torch.tensor([[[-1, 7, 8], [1, 2, 6]]] * BATCH, dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", [PromptLookup, SuffixDecoding, Lookahead, lambda: DraftModel(model(seed=1))])
def test_texts_with_edits_do_not_depend_on_drafts(drafter: Any, temperature: float) -> None:
    sampling = Sampling.full(BATCH, temperature=temperature)
    how: dict[str, Any] = {"sampling": sampling, "seed": 3, "max_new_tokens": 24, "edits": edits()}
    plain = generate(model(), None, STARTS, **how)
    drafted = generate(model(), drafter(), STARTS, **how)
    assert_same(drafted.tokens, plain.tokens, model(), STARTS, sampling)
    assert plain.tokens != generate(model(), None, STARTS, **{**how, "edits": None}).tokens
    assert all(9 not in tokens for tokens in plain.tokens)


def test_counts_that_the_loop_keeps_are_refused() -> None:
    counted = edits()._replace(counts=TokenCounts.empty(BATCH, 8))
    with pytest.raises(ValueError, match="edits must have no counts, slots and tail"):
        generate(model(), None, STARTS, sampling=Sampling.full(BATCH, temperature=0.0), edits=counted)


@pytest.mark.parametrize("drafter", [PromptLookup, Lookahead])
def test_texts_of_transformers_with_all_its_penalties(drafter: Any) -> None:
    width = max(map(len, STARTS))
    ids = torch.tensor([[0] * (width - len(start)) + start for start in STARTS])
    mask = torch.tensor([[0] * (width - len(start)) + [1] * len(start) for start in STARTS])
    how: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **ALL
    }  # fmt: skip
    want = model().generate(ids, **how)
    got = model().generate(ids, custom_generate=hf.generate, drafter=drafter(), **how)
    assert torch.equal(got[:, : want.shape[1]], want[:, : got.shape[1]])


def test_texts_without_some_first_tokens_and_some_pairs() -> None:
    ids = torch.tensor([[5, 6, 7], [12, 3, 9], [20, 21, 2]])
    plain = model().generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[:, 3:]
    pairs = [[[int(a), int(b)], -INF] for a, b in zip(plain[0], plain[0][1:], strict=False)]
    how: dict[str, Any] = {
        "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "sequence_bias": pairs[2:5],
        "begin_suppress_tokens": plain[:, 0].unique().tolist(),
    }  # fmt: skip
    want = model().generate(ids, **how)
    assert not torch.equal(want[:, 3], plain[:, 0])
    got = model().generate(ids, custom_generate=hf.generate, drafter=Lookahead(), **how)  # trees take edits alone
    assert torch.equal(got[:, : want.shape[1]], want[:, : got.shape[1]])


def test_processors_become_edits_from_the_last_one_back() -> None:
    bias, penalty = SequenceBiasLogitsProcessor({(3,): 1.0}), RepetitionPenaltyLogitsProcessor(1.2)
    words, least = NoBadWordsLogitsProcessor([[5], [6, 7]]), MinNewTokensLengthLogitsProcessor(4, 3, [1])
    ngram, banned = NoRepeatNGramLogitsProcessor(2), SuppressTokensLogitsProcessor([8])
    device = torch.device("cpu")

    def left(*processors: Any) -> tuple[list[Any], Edits | None]:
        return split_edits(LogitsProcessorList(processors), batch=2, width=4, padding=set(), device=device)[:2]

    rest, found = left(bias, penalty, words, least, banned)
    assert rest == [] and found is not None
    assert found.bias_ids is not None and found.bias_ids.tolist() == [[3, 8]] * 2
    assert found.bad_words is not None and found.bad_words.tolist() == [[[-1, 5], [6, 7]]] * 2
    assert found.min_tokens is not None and found.min_tokens.tolist() == [3, 3]
    assert left(bias, penalty, ngram, words)[0] == [bias, penalty, ngram]
    assert left(penalty, bias)[0] == [penalty]  # the other order: a penalty of the biased logits is no edit
    assert left(SequenceBiasLogitsProcessor({(3, 4): 1.0}), penalty)[0] != []
    assert left(ngram) == ([ngram], None)
    at_begin, later = (SuppressTokensAtBeginLogitsProcessor([9, 2], index) for index in (4, 5))
    rest, found = left(SequenceBiasLogitsProcessor({(6, 7): -INF, (3,): 0.5}), penalty, at_begin)
    assert rest == [] and found is not None and found.bias is not None and found.bad_words is not None
    assert (found.bad_words.tolist(), found.bias.tolist()) == ([[[6, 7]]] * 2, [[0.5]] * 2)
    assert found.stop_ids is not None and found.min_tokens is not None
    assert (found.stop_ids.tolist(), found.min_tokens.tolist()) == ([[2, 9]] * 2, [1, 1])
    assert left(later) == ([later], None)
    assert left(least, at_begin)[0] == [least]  # other ids until another length
