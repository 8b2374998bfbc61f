"""The models of this repository: what they weigh, that they load, and that they were really trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_kernels import Sampling
from specdec_loop import generate
from specdec_loop.heads import load_draft_model
from specdec_loop.methods import METHODS, DrafterAssets

FOLDER = Path(__file__).parents[1] / "python/models"
LIMIT = 44 * 2**20  # bytes of all weights
PROMPT = "class Counter:\n    def __init__(self, name, value=None):\n        self.name = name\n        self.value ="
MODELS = [
    "draft-model",
    "draft-model-suffix",
    "blockwise",
    "medusa",
    "eagle",
    "eagle2",
    "eagle3",
    "mtp",
    "mtp-suffix",
    "mtp-tree",
    "dflash",
    "dflash-tree",
]


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.tensor([AutoTokenizer.from_pretrained(FOLDER / "target")(PROMPT)["input_ids"]])


def test_the_models_are_small_and_deep(target: Any) -> None:
    assert sum(p.stat().st_size for p in FOLDER.rglob("*.safetensors")) <= LIMIT
    assert target.config.num_hidden_layers >= 8
    assert len(AutoTokenizer.from_pretrained(FOLDER / "target")) == target.config.vocab_size


def test_the_target_knows_python(target: Any, prompt: torch.Tensor) -> None:
    assert target(prompt, labels=prompt).loss.item() < 2.0  # ids at random: 8.3


@pytest.mark.parametrize("name", MODELS)
def test_a_drafter_keeps_the_text_and_is_often_right(name: str, target: Any, prompt: torch.Tensor) -> None:
    assets = DrafterAssets(
        target,
        heads=FOLDER.joinpath,
        load_draft=lambda: load_draft_model(FOLDER / "draft", target),
        load_store=lambda: pytest.fail("no model needs a datastore"),
    )
    arguments = {"sampling": Sampling.full(1, temperature=0.7), "max_new_tokens": 32, "seed": 2, "stop": ()}
    plain = generate(target, None, prompt, **arguments)
    result = generate(target, METHODS[name].make(assets), prompt, **arguments)
    assert result.tokens == plain.tokens
    assert sum(result.statistics[0].accepted) >= 10
