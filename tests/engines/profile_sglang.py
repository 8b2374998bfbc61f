"""Tokens a step and a second in a real SGLang engine on a CPU, with and without the plug-in, in turns.

    PYTHON tests/engines/profile_sglang.py [--rounds 2]

PYTHON has SGLang and its CPU kernels. Prints a table: the repository's models in bfloat16, eight sampled requests of
200 tokens. Without the plug-in SGLang verifies them greedily on a CPU, so its texts are others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from sglang_texts import request, run

FOLDER = Path(__file__).parents[2] / "python/models"
PROMPTS = ["def __init__(self, name):\n", "import os\n", "for key, value in items:\n    if key", "class Reader:\n"]
SPECULATIONS = ("none", "ngram", "draft", "draft tree", "eagle")
TOKENS = 200


def make_models(folder: Path) -> None:
    """As SGLang loads them: the draft model with the embedding that it borrows, the head under its name there."""
    import torch
    from transformers import LlamaForCausalLM

    from specdec_loop.heads import load_draft_model

    target = LlamaForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.bfloat16)
    target.save_pretrained(folder / "target")
    load_draft_model(FOLDER / "draft", target).to(torch.bfloat16).save_pretrained(folder / "draft")
    (folder / "eagle").mkdir()
    (folder / "eagle/model.safetensors").symlink_to(FOLDER / "eagle/model.safetensors")
    config = json.loads((FOLDER / "eagle/config.json").read_text())
    (folder / "eagle/config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle"]}))


def main() -> None:
    from transformers import PreTrainedTokenizerFast

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "target")
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    batch = [
        request(ids[i % 4], temperature=1.0, top_p=0.95, sampling_seed=i) | {"max_new_tokens": TOKENS} for i in range(8)
    ]
    rates, steps = defaultdict(list), {}
    with tempfile.TemporaryDirectory() as name:
        make_models(Path(name))
        for _ in range(rounds):
            for speculation in SPECULATIONS:
                for rule in ("off", "match"):
                    found = run(name, speculation, [batch] * 3, rule=rule)  # the first one compiles
                    rates[speculation, rule] += [8 * TOKENS / seconds for seconds in found["seconds"][1:]]
                    made = sum(found["steps"][-1]) or 8 * (TOKENS - 1)
                    steps[speculation, rule] = 8 * (TOKENS - 1) / made
    print("| drafts | tokens a step, SGLang | with the plug-in | tokens/s, SGLang | with the plug-in |")
    print("|---|--:|--:|--:|--:|")
    for kind in SPECULATIONS:
        cells = [f"{steps[kind, rule]:.2f}" for rule in ("off", "match")]
        cells += [f"{statistics.median(rates[kind, rule]):.0f}" for rule in ("off", "match")]
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
