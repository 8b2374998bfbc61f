"""Texts of the decoding loop on tiny random models, whose distribution is enumerated: dense, hybrid, every drafter."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
import transformers

from specdec_kernels import ChainRule, Sampling, TreeRule
from specdec_loop.drafters import (
    BlockDrafter,
    BlockTree,
    Drafter,
    DraftModel,
    EagleTree,
    HeadChain,
    IndependentDrafts,
    ParallelChain,
    SuffixDecoding,
)
from specdec_loop.generation import generate
from specdec_loop.heads import DFlashHead, EagleHead, MtpHead, PEagleHead, Shared
from specdec_loop.heads.mtp_layers import MtpLayer

from .exact import Filters, Table, joint_counts, joint_distribution, tree_of_histories
from .experiments import Finding, finding

VOCAB, LENGTH, DRAFT = 4, 4, 3  # ids, tokens of a text, drafts of a step
PROMPT = [2, 1, 0, 3, 1, 1, 0, 2, 0, 0]  # each id has been followed by others, which the targets allow
FILTERS: Filters = {"temperature": 0.9, "top_k": 3}
CHUNK = 2000  # requests of a batch
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# Class in transformers, and what its configuration has besides these sizes.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention (Llama)": ("Llama", {"num_hidden_layers": 1}),
    "Mamba 2": (
        "Mamba2",
        {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "Mamba 2 and attention (Bamba)": (
        "Bamba",
        {
            "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8,
            "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8,
        },
    ),
    "gated delta rule and attention (Qwen 3.5)": (
        "Qwen3_5",
        {
            "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
            "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}  # fmt: skip


@cache
def tiny(target: str, seed: int) -> Any:
    """A model of few ids whose distribution depends on the whole text."""
    stem, special = TARGETS[target]
    kind = getattr(transformers, f"{stem}TextConfig", None) or getattr(transformers, f"{stem}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem}ForCausalLM")(kind(**SIZES, **special, initializer_range=0.3))
    return model.eval().requires_grad_(False)


def _head(kind: Callable[..., Any], target: str, *, layers: int = 1, fields: dict[str, Any], **options: Any) -> Any:
    """A head on a target."""
    model, config = tiny(target, 0), transformers.LlamaConfig(**SIZES, **fields, num_hidden_layers=layers)
    config._attn_implementation = "sdpa"
    return _random(kind(config, Shared(model), **options))


@torch.no_grad()
def _random(head: Any) -> Any:
    """The same with random weights, so large that it says something."""
    g = torch.Generator().manual_seed(2)
    for weight in head.parameters():
        weight.copy_(torch.randn(weight.shape, generator=g) * 0.3 + (weight.dim() == 1))
    return head.eval().requires_grad_(False)


def _layer(target: str) -> MtpLayer:
    model = tiny(target, 0)
    layer: MtpLayer = _random(MtpLayer(model, Shared(model)))
    return layer


def _block(target: str) -> DFlashHead:
    named = {"levels": (0, -1), "block_size": 1 + DRAFT, "mask_id": 0}
    head: DFlashHead = _head(DFlashHead, target, layers=2, fields={}, **named)
    return head


def _parallel(target: str) -> PEagleHead:
    levels = [0, tiny(target, 0).config.num_hidden_layers // 2, -1]
    fields = {"draft_vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": levels, "mask_token_id": 0}
    head: PEagleHead = _head(PEagleHead, target, fields=fields)
    head.choose(torch.arange(VOCAB))
    return head


# One more layer of the target's own kind.
LAYER, WITH_LAYER = "MTP layer of a checkpoint", ("attention (Llama)", "gated delta rule and attention (Qwen 3.5)")
DRAFTERS: dict[str, tuple[ChainRule | TreeRule, Callable[[str], Drafter]]] = {
    "draft model": ("ratio", lambda t: DraftModel(tiny(t, 1))),
    "draft model, block": ("block", lambda t: DraftModel(tiny(t, 1))),
    "independent drafts, a tree": ("recursive", lambda t: IndependentDrafts(tiny(t, 1), 2)),
    "suffixes": ("ratio", lambda t: SuffixDecoding()),
    "MTP head": ("block", lambda t: HeadChain(_head(MtpHead, t, fields={}))),
    LAYER: ("block", lambda t: HeadChain(_layer(t))),
    "EAGLE, a drawn tree": ("traversal", lambda t: EagleTree(_head(EagleHead, t, fields={}), ((0,), (1,), (0, 0)))),
    "P-EAGLE": ("ratio", lambda t: ParallelChain(_parallel(t))),
    "DFlash": ("block", lambda t: BlockDrafter(_block(t))),
    "DFlash, the likeliest tree": ("recursive", lambda t: BlockTree(_block(t), width=2, total=5)),
}


@cache
@torch.no_grad()
def table_of(target: str) -> Table:
    """Rows of a target and of its draft model behind every history, by forwards without a cache."""
    rows = []
    for seed in (0, 1):
        texts = [torch.tensor([[*PROMPT, *h] for h in product(range(VOCAB), repeat=n)]) for n in range(LENGTH)]
        rows.append(torch.cat([tiny(target, seed)(some, use_cache=False).logits[:, -1] for some in texts]))
    return Table(rows[0], rows[1], tree_of_histories(VOCAB, LENGTH))


@dataclass(frozen=True)
class Job:
    """A drafter on a target.

    Attributes:
        target: of `TARGETS`.
        drafter: of `DRAFTERS`.
        texts: how many.
    """

    target: str
    drafter: str
    texts: int

    def run(self) -> Finding:
        """Decode, count, compare; the first token of a text is drawn as plain decoding draws it."""
        cpu, seed = time.process_time(), zlib.crc32(f"{self.target} {self.drafter}".encode())
        table = table_of(self.target)
        rule, make = DRAFTERS[self.drafter]
        tokens, accepted, drafts = [], [], 0
        for first in range(0, self.texts, CHUNK):
            n = min(CHUNK, self.texts - first)
            done = generate(
                tiny(self.target, 0), make(self.target), [PROMPT] * n, sampling=Sampling.full(n, **FILTERS),  # type: ignore[arg-type]
                seed=(torch.arange(n) + first + seed) * 7919, rule=rule, draft_length=DRAFT, max_new_tokens=LENGTH + 1,
                stop=(),
            )  # fmt: skip
            tokens += [text[:LENGTH] for text in done.tokens]
            accepted += [row.accepted[0] for row in done.statistics]
            drafts += sum(sum(row.drafted) for row in done.statistics)
        keys, distribution = joint_distribution(table, LENGTH, FILTERS)
        counts = joint_counts(torch.tensor(tokens), VOCAB, keys)
        steps = torch.tensor(accepted, dtype=torch.float64)
        found = finding(
            keys, distribution, counts, table, FILTERS, experiment="loop", case=self.target,
            method=f"{self.drafter} ({rule}){'' if drafts else ', which drafted nothing'}", length=LENGTH,
            accepted=float(steps.mean()), spread=float(steps.std()) / math.sqrt(len(steps)), theory=None, cpu=cpu,
        )  # fmt: skip
        return found if drafts else replace(found, tokens_p=0.0)  # nothing was tested


def jobs(texts: int) -> Iterator[Job]:
    """Every drafter on every target that it fits."""
    for target in TARGETS:
        for drafter in DRAFTERS:
            if drafter != LAYER or target in WITH_LAYER:
                yield Job(target, drafter, texts)
