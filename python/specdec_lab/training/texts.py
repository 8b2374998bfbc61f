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


def run(args: argparse.Namespace) -> None:
    """Write them."""
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
