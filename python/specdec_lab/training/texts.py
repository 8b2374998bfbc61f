"""Texts that the target says itself, for its drafters to learn from: at work they continue these, not the corpus."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from specdec_kernels import Sampling
from specdec_loop import corpus
from specdec_loop.generation import generate

from .target import prepare

PROMPT = 64
TEMPERATURES = (0.0, 0.7, 1.0)
FILE = "texts.safetensors"


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="specdec_lab.training.texts", description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("python/models"), help="folder of the target's folder")
    parser.add_argument("--work", type=Path, default=Path("build/training"), help=f"folder of {FILE}")
    parser.add_argument("--count", type=int, default=6144, help="texts")
    parser.add_argument("--length", type=int, default=256, help=f"tokens of a text, {PROMPT} of them from the corpus")
    parser.add_argument("--batch", type=int, default=192, help="texts at a time")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bfloat16", action="store_true", help="half the time where the processor has AMX")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    dtype = torch.bfloat16 if args.bfloat16 else torch.float32
    target = LlamaForCausalLM.from_pretrained(args.models / "target", dtype=dtype).eval().requires_grad_(False)
    tokens, _ = prepare(args.models / "target")
    args.work.mkdir(parents=True, exist_ok=True)
    generator, rows = torch.Generator().manual_seed(args.seed), []
    for begun in track(range(0, args.count, args.batch), description="texts"):
        count = min(args.batch, args.count - begun)
        prompts = corpus.windows(tokens, count, PROMPT, generator)
        temperature = torch.tensor(TEMPERATURES).repeat(-(-count // len(TEMPERATURES)))[:count]
        said = generate(
            target,
            None,
            prompts,
            sampling=Sampling(temperature=temperature),
            seed=args.seed + begun,
            max_new_tokens=args.length - PROMPT,
            stop=(),
        )
        rows.append(torch.cat([prompts, torch.tensor(said.tokens)], 1).short())
    save_file({"texts": torch.cat(rows)}, args.work / FILE)


def load(path: Path) -> Tensor:
    """Texts ``[count, length]``, int16."""
    return load_file(path)["texts"]


if __name__ == "__main__":
    main()
