"""The server's engine without HTTP: continuous batching, a paged cache, concurrent requests that speculate.

`specdec_loop.serve.engine` is a template for your own engine: a step admits requests, runs one forward over pages,
verifies all drafts in one call of `verify_chain` or `verify_tree`, and commits.

python examples/engine.py --concurrent 4 --temperature 0.8 'import os' 'class Reader'
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_loop import PromptLookup
from specdec_loop.draft_length import FixedLength
from specdec_loop.serve.engine import Engine
from specdec_loop.serve.request import Request


def main() -> None:
    models = Path(__file__).resolve().parent.parent / "python/models"
    known = ["import os\nimport sys\n", "class Reader:\n    def __init__(", "def main():\n    parser = ", "try:\n    "]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=known)
    parser.add_argument("--model", default=models / "target", help="folder of a transformers causal LM")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--concurrent", type=int, default=3, help="requests that run at once; the others wait")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--drafts", type=int, default=4, help="of a step; 0: plain decoding")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    engine = Engine(
        model,
        lambda: PromptLookup() if args.drafts else None,
        draft_length=FixedLength(max(args.drafts, 1)),
        slots=args.concurrent,
    )
    requests = [
        engine.submit(Request(tokenizer(prompt)["input_ids"], args.tokens, args.temperature, seed=i))
        for i, prompt in enumerate(args.prompts)
    ]
    start = time.perf_counter()
    engine.run()
    seconds = time.perf_counter() - start
    for request in requests:
        steps = len(request.accepted) + 1
        print(f"--- {len(request.new)} tokens in {steps} steps, {sum(request.accepted) / steps:.2f} drafts kept a step")
        print(tokenizer.decode(request.tokens))
    said, kept = sum(len(r.new) for r in requests), sum(len(r.accepted) + 1 for r in requests)
    print(f"--- {said / seconds:.1f} tokens/s, {said / kept:.2f} tokens a request and step")


if __name__ == "__main__":
    main()
