"""The target: a small Llama, trained on the corpus."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_loop import corpus

from .run import Run, optimizers

VOCAB = 4096
POSITIONS = 1024


def config(vocab_size: int) -> LlamaConfig:
    """Deep and thin: a one-layer drafter costs little beside it."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def run(args: argparse.Namespace) -> None:
    """Tokenizer, training, and the model's folder."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokens, held_out_tokens = prepare(args.out)
    model = LlamaForCausalLM(config(len(corpus.load_tokenizer(args.out))))
    model.set_attn_implementation("eager")  # compiled, its backward takes half the time of SDPA's on a CPU
    forward = torch.compile(model) if args.compile else model
    embeddings = {id(model.get_input_embeddings().weight)}
    made = optimizers(model.parameters(), embeddings, peak=args.peak)
    training = Run(
        model,
        made,
        minutes=args.minutes,
        peak=args.peak,
        seed=args.seed,
        folder=args.work / "target",
        resume=args.resume,
    )

    def loss(ids: Tensor, forward: Any = forward) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            return forward(ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

    checked = corpus.even_windows(held_out_tokens, 12 * args.batch, args.length).split(args.batch)

    def held_out() -> float:
        with torch.no_grad():
            return sum(loss(ids, model).item() for ids in checked) / len(checked)

    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokens):,} tokens", flush=True)
    loss(checked[0]).backward()  # compiling is not training
    model.zero_grad(set_to_none=True)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        found = loss(corpus.windows(tokens, args.batch, args.length, generator))
        return found, found.detach()

    training.train(batch, held_out, title="target")
    model.to(torch.bfloat16).save_pretrained(args.out)


def prepare(folder: Path) -> tuple[Tensor, Tensor]:
    """Tokens to train on and tokens held out; makes the tokenizer in a folder that has none."""
    paths = corpus.sources()
    texts = corpus.read([p for p in paths if not corpus.is_held_out(p)])
    if not (folder / "tokenizer.json").exists():
        corpus.train_tokenizer(texts, VOCAB).save_pretrained(folder)
    tokenizer = corpus.load_tokenizer(folder)
    held_out = corpus.read([p for p in paths if corpus.is_held_out(p)])
    return corpus.encode(tokenizer, texts), corpus.encode(tokenizer, held_out)
