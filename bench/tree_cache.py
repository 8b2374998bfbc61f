"""A decode step against context length: TreeCache beside transformers' DynamicCache, which copies itself every step.

Two parts: the whole step of a small Llama-type model (attention reads the cache in both), and the cache's share alone,
which is where the copy lies. A step appends one token and takes it back, so that every run starts at the same length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cases import DEVICE, OpCase
from .suite import Run

LENGTHS = (512, 1024, 2048, 4096, 8192)
PARTS = {"step": "decode step", "cache": "the cache's share"}
LAYERS, HEADS, DIM = 8, 8, 128


@dataclass(frozen=True)
class TreeCacheCase(OpCase):
    """One context length."""

    length: int
    part: str = "step"
    batch: int = 1

    @property
    def words(self) -> str:
        """Part, sizes, context length."""
        shape = f"{LAYERS} layers, {HEADS} heads x {DIM}, fp32"
        return f"{PARTS[self.part]}, {shape}, batch {self.batch}, context {self.length}"


QUICK = 5
CASES = [TreeCacheCase("tree_cache", length, part) for part in PARTS for length in LENGTHS]


@functools.cache
def network() -> Any:
    """A Llama of random weights, 8 heads of 128 in each layer as an 8B model has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=HEADS * DIM, intermediate_size=2816, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=2 * LENGTHS[-1],
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().requires_grad_(False).to(DEVICE)


def inputs(case: TreeCacheCase) -> list[dict[str, Any]]:
    """Both caches, filled with the same rows."""
    from transformers import DynamicCache

    from specdec_loop import TreeCache

    config = network().config
    ours = TreeCache(config, batch=case.batch, capacity=case.length + 1, dtype=torch.float32, device=DEVICE)
    caches = {"TreeCache": ours, "DynamicCache": DynamicCache(config=config)}
    for layer in range(LAYERS):
        rows = torch.randn(2, case.batch, HEADS, case.length, DIM, device=DEVICE)
        for cache in caches.values():
            cache.update(*rows, layer)
    return [caches]


@torch.no_grad()
def step(cache: Any, batch: int) -> Tensor:
    """The logits after one more token."""
    token = torch.ones(batch, 1, dtype=torch.int64, device=DEVICE)
    logits: Tensor = network()(token, past_key_values=cache).logits
    cache.crop(-1)
    return logits


def share(cache: Any, batch: int) -> list[Tensor]:
    """One more row in every layer, and back."""
    row = torch.ones(batch, HEADS, 1, DIM, device=DEVICE)
    views = [view for layer in range(LAYERS) for view in cache.update(row, row, layer)]
    cache.crop(-1)
    return views


def runs(case: TreeCacheCase, cache: str) -> dict[str, Run]:
    """The part of a step that a case times."""
    work = step if case.part == "step" else share
    return {cache: lambda caches: work(caches[cache], case.batch)}


def variants(case: TreeCacheCase, backend: str) -> dict[str, Run]:
    """Ours."""
    return runs(case, "TreeCache")


def rivals(case: TreeCacheCase, made: Sequence[Any]) -> dict[str, Run]:
    """One."""
    return runs(case, "DynamicCache")


def check(case: TreeCacheCase, run: Run, caches: Any) -> None:
    """Each gives what the other gives."""
    work = runs(case, "TreeCache") | runs(case, "DynamicCache")
    for a, b in zip(*(one(caches) for one in work.values()), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4), f"they differ by {(a - b).abs().max()}"
