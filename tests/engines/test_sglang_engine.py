"""The plug-in in a real SGLang engine on a CPU, where SGLang's CPU kernels are installed and the CPU has AMX.

Engines compute in bfloat16, and verify with other kernels than they decode with. So that texts can be compared, the
models here are Markov chains whose logits are exact in bfloat16 whatever the order of the sums: embeddings of +-1, no
attention or MLP that adds anything, an output layer of eighths. Their texts are computed here too, without an engine.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_texts import TOKENS, request, run
from torch import Tensor

from specdec_kernels import RngKey, Sampling, sample


def missing() -> str | None:
    """Why no engine can run here."""
    if importlib.util.find_spec("sglang") is None:
        return "make test-engines installs sglang in an environment of its own"
    if importlib.util.find_spec("sgl_kernel") is None:
        return "SGLang's CPU kernels (sgl_kernel) are not installed: they are built from its sources, docs/engines.md"
    if not torch.cpu._is_amx_tile_supported():
        return "SGLang's CPU kernels need a CPU with AMX"
    return None


if reason := missing():
    pytest.skip(reason, allow_module_level=True)

VOCAB = WIDTH = 64


def weights(seed: int) -> tuple[Tensor, Tensor]:
    """Embedding and output layer."""
    g = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (VOCAB, WIDTH), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return signs.float(), torch.randint(-4, 5, (VOCAB, WIDTH), generator=g) / 8


def write(folder: Path, embedding: Tensor, head: Tensor) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.model.embed_tokens.weight.data.copy_(embedding)
    model.lm_head.weight.data.copy_(head)
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    model.model.layers[0].mlp.down_proj.weight.data.zero_()
    model.save_pretrained(folder)


def write_eagle(folder: Path, target: Path) -> None:
    """An EAGLE head that predicts from the embedding alone: what the target will say most likely."""
    from safetensors.torch import load_file, save_file

    config = json.loads((target / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle"]}
    kept = {
        name.removeprefix("model."): w
        for name, w in load_file(target / "model.safetensors").items()
        if ".layers." in name and "input_layernorm" not in name
    }
    kept["fc.weight"] = torch.cat([torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)], 1).bfloat16()
    kept["fc.bias"] = torch.zeros(WIDTH).bfloat16()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(kept, folder / "model.safetensors")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("markov")
    embedding, head = weights(1)
    write(folder / "target", embedding, head)
    other = torch.where(torch.arange(VOCAB)[:, None] % 3 == 0, weights(2)[1], head)
    write(folder / "draft", embedding, other)
    write_eagle(folder / "eagle", folder / "target")
    return str(folder)


PROMPTS = [[5, 6, 7, 8], [9, 6, 7], [1], [33, 6, 53, 41, 7, 45]]


@pytest.fixture(scope="session")
def requests() -> list[dict[str, Any]]:
    """Greedy ones, and seeded ones with each of the filters."""
    parameters: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.8, "min_p": 0.1},
        {"temperature": 0.7, "logit_bias": {"6": 3.0, "58": -4.0}},
    ]
    return [request(PROMPTS[i % 4], sampling_seed=20 + i, **each) for i, each in enumerate(parameters)]


@pytest.fixture(scope="session")
def penalized() -> list[dict[str, Any]]:
    """Greedy and seeded requests whose penalties change the text."""
    parameters: list[dict[str, Any]] = [
        {"temperature": 0.0, "frequency_penalty": 0.7},
        {"temperature": 0.8, "presence_penalty": 1.5},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.8},
    ]
    return [request(PROMPTS[i], sampling_seed=40 + i, **each) for i, each in enumerate(parameters)]


def text_of(one: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Plain decoding without an engine: the logits of the last token, and `sample`. Tokens, their log-probabilities."""
    embedding, head = weights(1)
    logits, scores, prompt = embedding @ head.T, [], one["prompt"]
    for token, bias in one.get("logit_bias", {}).items():
        logits[:, int(token)] += bias
    sampling = Sampling.full(
        1, temperature=one["temperature"], top_k=one.get("top_k"), top_p=one.get("top_p"), min_p=one.get("min_p")
    )
    text, counts = list(prompt), torch.zeros(VOCAB)
    for _ in range(TOKENS):
        row = logits[text[-1]] - one.get("frequency_penalty", 0) * counts
        row = row - one.get("presence_penalty", 0) * (counts > 0)
        scale = torch.where(counts > 0, one.get("repetition_penalty", 1.0), 1.0)
        row = torch.where(row < 0, row * scale, row / scale)
        rng = RngKey(torch.tensor([one["sampling_seed"]]), torch.tensor([len(text)]))
        token = int(sample(row[None], sampling=sampling, rng=rng, purpose="target").token_ids)
        text.append(token)
        counts[token] += 1
        scores.append(float((row / (one["temperature"] or 1)).log_softmax(-1)[token]))
    return text[len(prompt) :], scores


def texts_of(batch: list[dict[str, Any]]) -> list[list[int]]:
    return [text_of(one)[0] for one in batch]


def check(found: dict[str, Any], batches: list[list[dict[str, Any]]]) -> None:
    """Texts and log-probabilities of an engine; no batch was left to SGLang's own code."""
    assert found["texts"] == [texts_of(batch) for batch in batches]
    for batch, scores in zip(batches, found["scores"], strict=True):
        for one, listed in zip(batch, scores, strict=True):
            assert [score for score, *_ in listed] == pytest.approx(text_of(one)[1], abs=1e-4)
    assert "left to SGLang" not in found["log"]


def test_plain_texts_are_those_of_their_seeds(
    models: str, requests: list[dict[str, Any]], penalized: list[dict[str, Any]]
) -> None:
    """Under overlap scheduling SGLang counts one token too late for its penalties."""
    batches = [requests, requests[2:4], requests[:1], penalized]
    check(run(models, "none", batches, options={"disable_overlap_schedule": True}), batches)
    check(run(models, "none", batches[:3]), batches[:3])


@pytest.mark.parametrize("speculation", ["ngram", "draft", "draft tree", "eagle", "eagle tree"])
def test_texts_are_those_without_speculation(
    models: str, requests: list[dict[str, Any]], penalized: list[dict[str, Any]], speculation: str
) -> None:
    batches = [requests, requests[2:4], requests[:1], penalized]
    found = run(models, speculation, batches)
    check(found, batches)
    assert sum(found["steps"][0]) < 0.9 * (TOKENS - 1) * len(requests), "hardly a draft was accepted"


def test_texts_do_not_depend_on_seats_chunks_and_prefixes(
    models: str, requests: list[dict[str, Any]], penalized: list[dict[str, Any]]
) -> None:
    """More requests than seats, prompts in chunks, prefixes from the cache; and copies of one request."""
    batches = [requests + penalized, requests[::-1], penalized]
    options = {"max_running_requests": 3, "chunked_prefill_size": 4, "disable_radix_cache": False}
    copied = requests[1] | {"n": 3}
    found = run(models, "draft tree", [*batches, [copied]], options=options)
    last, seed = found["texts"].pop(), copied["sampling_seed"]
    assert last == texts_of([copied | {"sampling_seed": seed + i} for i in range(3)])
    found["scores"].pop()
    check(found, batches)


@pytest.mark.parametrize(
    ("rule", "speculation"), [("target_only", "draft tree"), ("ratio", "draft"), ("block", "eagle")]
)
def test_a_text_of_the_other_rules_depends_on_its_request_alone(
    models: str, requests: list[dict[str, Any]], rule: str, speculation: str
) -> None:
    """Greedy texts are those of plain decoding."""
    found = run(models, speculation, [requests, requests[2:4], requests[:1]], rule=rule)
    first = found["texts"][0]
    assert found["texts"][1:] == [first[2:4], first[:1]]
    assert first[0] == text_of(requests[0])[0] and first[1:] != texts_of(requests[1:])
    assert "left to SGLang" not in found["log"]


def test_without_the_plugin_speculation_on_a_cpu_is_greedy(models: str, requests: list[dict[str, Any]]) -> None:
    """Behind its first token, which the prompt gives, the text of a sampled request is that of a greedy one."""
    found = run(models, "draft", [requests[1:3]], rule="off")["texts"][0]
    for one, text in zip(requests[1:3], found, strict=True):
        greedy, _ = text_of(one | {"temperature": 0.0, "prompt": one["prompt"] + text[:1]})
        assert text[1:] == greedy[:-1] != text_of(one)[0][1:]


def test_what_is_left_to_sglang_is_said_in_its_log(models: str, requests: list[dict[str, Any]]) -> None:
    found = run(models, "draft tree", [requests[1:2]], rule="ratio")
    assert "batches with trees, under ratio are left to SGLang's own code" in found["log"]
