"""Each drafter: what it proposes, and that sampled drafts leave the target's law alone."""

from __future__ import annotations

import pytest
import torch
from text_laws import REQUESTS, law, many, surprise, tiny

from specdec_kernels import Sampling
from specdec_loop import AdaptiveLength, DraftModel, generate
from specdec_loop.drafters import Draft
from specdec_loop.text import Text

FALSE_ALARM = 1e-6  # of each law test below; seeds are fixed, so an alarm would stay

# --- the law of the first three tokens


@pytest.mark.parametrize(
    ("rule", "length", "temperature"), [("ratio", 1, 0.7), ("ratio", 3, 1.0), ("block", 3, 1.0), ("match", 3, 0.7)]
)
def test_chains_leave_the_law_alone(rule: str, length: int, temperature: float) -> None:
    result = generate(tiny(0), DraftModel(tiny(1)), rule=rule, draft_length=length, **many(temperature))
    assert surprise(result.tokens, law(tiny(0), temperature)) > FALSE_ALARM
    # Drafts are neither all right nor all wrong, or nothing would have been tested.
    assert 0.2 < sum(r.accepted[0] > 0 for r in result.statistics) / len(result.tokens) < 0.95


def test_drafts_may_have_a_temperature_of_their_own() -> None:
    drafter = DraftModel(tiny(1), sampling=Sampling.full(REQUESTS, temperature=1.7))
    result = generate(tiny(0), drafter, rule="ratio", **many())
    assert surprise(result.tokens, law(tiny(0), 1.0)) > FALSE_ALARM


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_smaller_vocabulary_leaves_the_law_alone(rule: str) -> None:
    drafter = DraftModel(tiny(2, vocab=3), token_map=torch.tensor([3, 0, 2]).int())
    result = generate(tiny(0), drafter, rule=rule, **many())
    assert surprise(result.tokens, law(tiny(0), 1.0)) > FALSE_ALARM


class Liar(DraftModel):
    """Says that its drafts were drawn at another temperature than they were."""

    def draft(self, text: Text, length: int) -> Draft:
        return super().draft(text, length)._replace(stats=None, sampling=Sampling.full(text.batch, temperature=2.0))


class Picky(DraftModel):
    """Looks at a token that it drew before it decides whether to draft it."""

    def draft(self, text: Text, length: int) -> Draft:
        draft = super().draft(text, length)
        return draft._replace(token_ids=draft.token_ids.masked_fill((draft.token_ids == 1).cumsum(1) > 0, -1))


@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("wrong", [Liar, Picky])
def test_a_small_bias_is_seen(wrong: type[DraftModel], rule: str) -> None:
    result = generate(tiny(0), wrong(tiny(1)), rule=rule, draft_length=3, **many())
    assert surprise(result.tokens, law(tiny(0), 1.0)) < FALSE_ALARM


def test_lengths_that_adapt_leave_the_law_alone() -> None:
    texts = []
    for call in range(250):  # small batches, or the lengths would follow the mean of all
        arguments = many(requests=8)
        arguments["seed"] += call * 100_003
        lengths = AdaptiveLength(3, cost=0.2, memory=1.0)
        result = generate(tiny(0), DraftModel(tiny(1)), rule="ratio", draft_length=lengths, **arguments)
        texts += result.tokens
    assert surprise(texts, law(tiny(0), 1.0)) > FALSE_ALARM
