"""Four prompts in one speculative `generate` on a static cache, beside assisted generation run once for each.

python examples/transformers_batch.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_loop import hf
from specdec_loop.heads import load_draft_model

MODELS = Path(__file__).resolve().parent.parent / "python/models"
PROMPTS = [
    "def __init__(self, name, value=None):\n",
    '"""Read and write files.\n\n',
    "import os\nimport sys\n\nclass ",
    "    for key, value in items:\n        if ",
]
TOKENS, ROUNDS = 96, 3


def load() -> tuple[Any, Any, Any]:
    """Target, draft model and tokenizer of the repository."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target", padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()
    return target, load_draft_model(MODELS / "draft", target), tokenizer


def compare(tokens: int = TOKENS, rounds: int = ROUNDS) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Texts and median seconds of each way; the ways take turns, so that a busy moment hits all of them."""
    target, draft, tokenizer = load()
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    how = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    static = {**inputs, **how, "cache_implementation": "static"}

    def assisted() -> Tensor:
        alone = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
        texts = [target.generate(**one, **how, assistant_model=draft)[0, one["input_ids"].shape[1] :] for one in alone]
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=tokenizer.pad_token_id)

    ways: dict[str, Callable[[], Tensor]] = {
        "plain generate, batch 4, static cache": lambda: target.generate(**static),
        "assisted generation, four times": assisted,
        "specdec_loop.hf.generate, batch 4, static cache": lambda: target.generate(
            **static, custom_generate=hf.generate, draft_model=draft
        ),
    }
    texts: dict[str, Tensor] = {}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            texts[name] = way()
            times[name].append(time.perf_counter() - start)
    return texts, {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    texts, seconds = compare()
    plain, assisted, ours = seconds
    print(f"four prompts, {TOKENS} tokens each, greedy, float32, {torch.get_num_threads()} threads")
    for name, taken in seconds.items():
        print(f"  {name:<50} {taken:7.2f} s {seconds[assisted] / taken:6.2f} x")
    print("texts equal plain generate:", torch.equal(texts[ours], texts[plain]))


if __name__ == "__main__":
    main()
