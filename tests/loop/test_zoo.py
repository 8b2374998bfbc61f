"""The models of this repository: what they weigh, that they load, and that they were really trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec_kernels import Sampling
from specdec_loop import generate
from specdec_loop.training import corpus
from specdec_loop.zoo import FOLDER, load_drafters, load_target

LIMIT = 44 * 2**20  # bytes of all weights
PROMPT = "    def __init__(self, name, value=None):\n        self.name = name\n"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json here"):
        load_target(tmp_path)
    target, _ = load_target()
    assert load_drafters(target, tmp_path) == {}


def test_the_models_are_small_and_deep() -> None:
    assert sum(p.stat().st_size for p in FOLDER.rglob("*.safetensors")) <= LIMIT
    target, tokenizer = load_target()
    assert target.config.num_hidden_layers >= 8
    assert len(tokenizer) == target.config.vocab_size
    assert target.dtype == torch.float32


def test_the_target_knows_python() -> None:
    target, tokenizer = load_target()
    ids = corpus.encode(tokenizer, [PROMPT])[None].long()
    assert target(ids, labels=ids).loss.item() < 3.5


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_drafter_keeps_the_text_and_is_often_right(temperature: float) -> None:
    target, tokenizer = load_target()
    prompt = corpus.encode(tokenizer, [PROMPT])[None, :-1].long()
    arguments = {"sampling": Sampling.full(1, temperature=temperature), "max_new_tokens": 48, "seed": 2, "stop": ()}
    plain = generate(target, None, prompt, **arguments)
    for name, drafter in load_drafters(target).items():
        result = generate(target, drafter, prompt, **arguments)
        assert result.tokens == plain.tokens, name
        assert sum(result.statistics[0].accepted) / len(result.statistics[0].accepted) > 0.4, name
