"""The drafters: distilled from the target on the text that it was trained on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_loop import corpus
from specdec_loop.heads import DFlashHead, Eagle3Head, EagleHead, MedusaHeads, MtpHead, Shared, save_head

from . import texts
from .losses import (
    Distributions,
    acceptance,
    block_distributions,
    cross_entropy,
    draft_model_distributions,
    feature_distributions,
    loss,
    medusa_distributions,
    refusal,
)
from .run import Run, optimizers
from .target import prepare

KINDS = ("draft", "medusa", "eagle", "eagle3", "mtp", "dflash")
DRAFT_VOCAB = 2048  # of EAGLE-3: the most frequent half
MEDUSA_HEADS, MEDUSA_LAYERS = 4, 2
DFLASH_LAYERS, DFLASH_BLOCK = 2, 6
BEGINNING = 0.25  # share of a run that minimises cross-entropy; the rest maximises acceptance


def run(args: argparse.Namespace) -> None:
    """Train those that are asked for, or all."""
    unknown = sorted(set(args.kinds) - set(KINDS))
    if unknown:
        raise ValueError(f"no drafter is called {', '.join(unknown)}; drafters are {', '.join(KINDS)}")
    torch.set_num_threads(args.threads)
    target = LlamaForCausalLM.from_pretrained(args.models / "target", dtype=torch.float32).eval().requires_grad_(False)
    tokens, held_out = prepare(args.models / "target")
    for kind in args.kinds or KINDS:
        train(kind, target, tokens, held_out, args)


def build(kind: str, target: Any, tokens: Tensor) -> tuple[nn.Module, dict[str, Any], Callable[..., Distributions]]:
    """An untrained drafter, the fields of its config.json, and what it says beside the target."""
    config = LlamaConfig.from_dict({**target.config.to_dict(), "_name_or_path": ""})
    config.num_hidden_layers = 1
    config._attn_implementation = "sdpa"
    shared = Shared(target)
    if kind == "draft":
        model = LlamaForCausalLM(config)
        model.set_input_embeddings(target.get_input_embeddings())
        model.set_output_embeddings(target.get_output_embeddings())
        return model, config.to_dict(), draft_model_distributions
    if kind == "medusa":
        heads = MedusaHeads(
            shared,
            size=config.hidden_size,
            vocab=config.vocab_size,
            heads=MEDUSA_HEADS,
            layers=MEDUSA_LAYERS,
            own_output=False,
        )
        return heads, {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": MEDUSA_LAYERS}, medusa_distributions
    if kind == "eagle3":
        config.draft_vocab_size = min(DRAFT_VOCAB, config.vocab_size)
        head = Eagle3Head(config, shared)
        frequency = torch.bincount(tokens.int(), minlength=config.vocab_size)
        chosen = frequency.topk(config.draft_vocab_size).indices.sort().values
        head.choose(chosen)
        with torch.no_grad():
            head.lm_head.weight.copy_(target.get_output_embeddings().weight[chosen])
        return head, config.to_dict(), feature_distributions
    if kind == "dflash":
        config.num_hidden_layers, last = DFLASH_LAYERS, shared.layers
        levels, mask_id = (2, last // 2, last - 3), config.eos_token_id
        blocks = DFlashHead(config, shared, levels=levels, block_size=DFLASH_BLOCK, mask_id=mask_id)
        return blocks, blocks.fields, block_distributions
    made = EagleHead(config, shared) if kind == "eagle" else MtpHead(config, shared)
    return made, config.to_dict(), feature_distributions


def train(kind: str, target: Any, tokens: Tensor, held_out_tokens: Tensor, args: argparse.Namespace) -> None:
    """Distil one drafter, and write its folder."""
    torch.manual_seed(args.seed)
    network, fields, distributions_of = build(kind, target, tokens)
    own = [p for p in network.parameters() if p.requires_grad]
    tables = {id(p) for name, p in network.named_parameters() if name == "lm_head.weight"}
    run = Run(
        network,
        optimizers(own, tables, peak=args.peak),
        minutes=args.minutes,
        peak=args.peak,
        seed=args.seed,
        folder=args.work / kind,
        resume=args.resume,
        measure="acceptance",
    )

    def measures(target: Any, ids: Tensor, *, is_beginning: bool) -> tuple[Tensor, Tensor]:
        """The loss, and the chance that a draft is accepted."""
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            with torch.no_grad():
                teacher = target(ids, use_cache=False, output_hidden_states=True)
            distributions = distributions_of(network, ids, teacher)
            return loss(distributions, cross_entropy if is_beginning else refusal), acceptance(distributions).detach()

    if args.compile:
        measures = torch.compile(measures)

    own_texts = texts.load(args.texts) if args.texts else tokens.new_empty(0, args.length)
    if own_texts.shape[1] < args.length:
        raise ValueError(f"{args.texts}: texts of at least {args.length} tokens expected, got {own_texts.shape[1]}")
    own_count = args.batch // 2 if len(own_texts) else 0

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = corpus.windows(tokens, args.batch - own_count, args.length, generator)
        chosen = torch.randint(max(len(own_texts), 1), (own_count,), generator=generator)
        ids = torch.cat([ids, own_texts[chosen, : args.length].long()])
        return measures(target, ids, is_beginning=run.progress < BEGINNING)

    checked = corpus.even_windows(held_out_tokens, 4 * args.batch, args.length).split(args.batch)

    def held_out() -> float:
        with torch.no_grad():
            return sum(measures(target, ids, is_beginning=False)[1].item() for ids in checked) / len(checked)

    for is_beginning in (True, False) if args.compile else ():  # compiling is not training
        measures(target, checked[0], is_beginning=is_beginning)[0].backward()
        held_out()
    network.zero_grad(set_to_none=True)
    run.train(batch, held_out, title=kind)
    save_head(network, args.models / kind, fields)
