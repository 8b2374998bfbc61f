"""The example of onnxruntime-genai: its texts are those of the runtime and of the loop, whatever is drafted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from specdec_kernels import Sampling
from specdec_loop import DraftModel, PromptLookup, SuffixDecoding, generate

og = pytest.importorskip("onnxruntime_genai", reason="make test-runtimes installs it in an environment of its own")
ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "python/models/target"
sys.path.insert(0, str(ROOT / "examples"))
import genai  # noqa: E402

torch.set_num_threads(1)  # the runtime has a pool of its own, whose threads spin
PROMPT = "def first(values):\n    return values[0]\n\n\ndef second(values):\n    return"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("genai")
    build = ["-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu", "-c", str(folder / "cache")]
    command = [sys.executable, *build, "-m", str(TARGET), "-o", str(folder / "model")]
    subprocess.run(command, check=True, capture_output=True)
    return og.Model(str(folder / "model"))


@pytest.fixture(scope="module")
def target() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return list(transformers.AutoTokenizer.from_pretrained(TARGET)(PROMPT)["input_ids"])


def test_logits_of_all_drafts_come_back_and_a_rewind_forgets_them(model: Any, target: Any, prompt: list[int]) -> None:
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=100)
    generator = og.Generator(model, params)
    for kept, new in ((0, prompt), (len(prompt), [5, 9, 11]), (len(prompt) + 1, [77, 78, 79, 80])):
        if kept:
            generator.rewind_to(kept)
        text = [*prompt, 5][:kept] + new
        generator.append_tokens(np.array([new], dtype=np.int32))
        want = target(torch.tensor([text])).logits[:, -len(new) :]
        torch.testing.assert_close(torch.from_numpy(generator.get_output("logits")), want, atol=1e-3, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["plain", "copies", "suffixes", "a model"])
def test_a_text_is_that_of_the_loop_whatever_is_drafted(
    model: Any, target: Any, prompt: list[int], name: str, temperature: float
) -> None:
    drafters = {
        "plain": lambda: None,
        "copies": PromptLookup,
        "suffixes": lambda: SuffixDecoding(factor=2.0),
        "a model": lambda: DraftModel(target),
    }
    tokens, steps = genai.decode(model, drafters[name](), prompt, temperature=temperature, seed=3, limit=60)
    sampling = Sampling.full(1, temperature=temperature)
    want = generate(target, None, [prompt], sampling=sampling, seed=3, max_new_tokens=60, stop=()).tokens[0]
    assert tokens == want
    assert (steps < 60) == (name != "plain")


def test_a_greedy_text_is_that_of_the_runtime(model: Any, prompt: list[int]) -> None:
    plain = genai.own(model, prompt, 60)
    assert genai.own(model, prompt, 60, ngram_size=3, max_draft_tokens=8) == plain
    assert genai.decode(model, PromptLookup(), prompt, limit=60, stop=[0])[0] == plain
