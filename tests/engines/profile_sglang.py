"""Tokens a step and a second in a real SGLang engine on a CPU, with and without the plug-in, one after the other.

    PYTHON tests/engines/profile_sglang.py [--batches 6]

PYTHON has SGLang and its CPU kernels. Prints a table: the repository's models in bfloat16, eight sampled requests of
100 tokens, the fastest batch. Without the plug-in SGLang verifies them greedily on a CPU, so its texts are others.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from sglang_texts import request, run

FOLDER = Path(__file__).parents[2] / "python/models"
PROMPTS = ["def __init__(self, name):\n", "import os\n", "for key, value in items:\n    if key", "class Reader:\n"]
SPECULATIONS = ("none", "draft", "draft tree", "ngram")
TOKENS = 100


def make_models(folder: Path) -> None:
    """As SGLang loads them: the draft model with the embedding that it borrows."""
    import torch
    from transformers import LlamaForCausalLM

    from specdec_loop.heads import load_draft_model

    target = LlamaForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.bfloat16)
    target.save_pretrained(folder / "target")
    load_draft_model(FOLDER / "draft", target).to(torch.bfloat16).save_pretrained(folder / "draft")


def main() -> None:
    from transformers import PreTrainedTokenizerFast

    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=6)
    batches = parser.parse_args().batches
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "target")
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    batch = [
        request(ids[i % 4], temperature=1.0, top_p=0.95, sampling_seed=i) | {"max_new_tokens": TOKENS} for i in range(8)
    ]
    print("| drafts | tokens a step, SGLang | with the plug-in | tokens/s, SGLang | with the plug-in |")
    print("|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as name:
        make_models(Path(name))
        for speculation in SPECULATIONS:
            steps, rates = [], []
            for rule in ("off", "match"):
                found = run(name, speculation, [batch] * batches, rule=rule)
                steps.append(8 * (TOKENS - 1) / (sum(found["steps"][-1]) or 8 * (TOKENS - 1)))
                rates.append(8 * TOKENS / min(found["seconds"]))
            cells = [f"{step:.2f}" for step in steps] + [f"{rate:.0f}" for rate in rates]
            print(f"| {speculation} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
