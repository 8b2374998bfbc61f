"""tree_attention beside torch's attention under the dense mask, and beside plain PyTorch; masks made before the clock.

A Llama-3-8B-like layer: 32 query heads, 8 key heads of 128; a tree of 64 nodes behind a long past. Or latent attention:
16 heads, an eighth of DeepSeek V3's, on one row of 512 and 64. Rivals of the paged case gather the pages first, and
those of the 8-bit case widen keys and values, as they have no other way to read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec_kernels import tree_attention, tree_layout, tree_mask

from . import trees
from .cases import DEVICE, OpCase
from .minimum import moved
from .rows import DTYPES
from .suite import Run

PAGE = 16
SIZES = {"": (32, 8, 128, 128), "e4m3": (32, 8, 128, 128), "latent": (16, 1, 576, 512)}  # heads, of keys; their dims
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class AttentionCase(OpCase):
    """One shape."""

    nodes: int = 64
    batch: int = 8
    past: int = 4096
    dtype: str = "bf16"
    format: str = "bhld"
    cache: str = ""  # or latent, e4m3

    @property
    def words(self) -> str:
        """Sizes, dtype, layout, cache."""
        sizes = f"{self.nodes} nodes, batch {self.batch}, past {self.past}, {self.dtype}, {self.format}"
        return f"{sizes}, {self.cache}" if self.cache else sizes


class AttentionInput(NamedTuple):
    """One call."""

    query: Tensor  # [batch, nodes, head, dim]
    key: Tensor
    value: Tensor
    table: Tensor | None
    ancestors: Tensor
    lengths: Tensor
    mask: Tensor  # bool [batch, 1, nodes, past + nodes]
    format: str
    scale: Tensor | None  # of keys and of values


OP, QUICK = "tree_attention", 4
CASES = [
    *(AttentionCase(OP, batch=batch, dtype=dtype) for batch in (1, 8) for dtype in ("fp32", "bf16")),
    AttentionCase(OP, batch=1, dtype="fp32", threads=1),
    AttentionCase(OP, batch=1, threads=1),
    AttentionCase(OP, dtype="fp16"),
    AttentionCase(OP, format="nhd"),
    AttentionCase(OP, nodes=1),
    AttentionCase(OP, nodes=8),
    AttentionCase(OP, nodes=256, past=512),
    AttentionCase(OP, cache="latent"),
    AttentionCase(OP, nodes=8, cache="latent"),
    AttentionCase(OP, nodes=8, cache="e4m3"),
]


def inputs(case: AttentionCase) -> list[AttentionInput]:
    """One batch: its cache alone is larger than what a core keeps."""
    numbers, generator = torch.Generator(DEVICE).manual_seed(0), torch.Generator().manual_seed(0)
    parents = torch.full((case.batch, 1), -1, dtype=torch.int32)
    if case.nodes > 1:
        parents = trees.shape(case.nodes, case.batch, varied=True).parents
    pages = -(-(case.past + case.nodes) // PAGE)
    heads, kv_heads, dim, value_dim = SIZES[case.cache]
    rows = (
        (case.batch, kv_heads, case.past + case.nodes)
        if case.format == "bhld"
        else (case.batch * pages, PAGE, kv_heads)
    )
    query, key, value = (
        torch.randn(size, generator=numbers, device=DEVICE).to(DTYPES[case.dtype])
        for size in ((case.batch, case.nodes, heads, dim), (*rows, dim), (*rows, value_dim))
    )
    table = scale = None
    if case.cache == "latent":
        value = key[..., :value_dim]
    if case.cache == "e4m3":
        key, value = key.to(torch.float8_e4m3fn), value.to(torch.float8_e4m3fn)
        scale = torch.tensor(0.5, device=DEVICE)
    if case.format == "nhd":
        table = torch.randperm(len(key), generator=generator).view(case.batch, pages).int().to(DEVICE)
    parents = parents.to(DEVICE)
    ancestors = tree_layout(parents, max_depth=trees.MAX_DEPTH).ancestors
    lengths = torch.full((case.batch,), case.past, device=DEVICE)
    mask = tree_mask(parents, past=case.past).mask
    return [AttentionInput(query, key, value, table, ancestors, lengths, mask, case.format, scale)]


def ours(case: AttentionCase, x: AttentionInput, backend: str) -> Tensor:
    """One call of the package."""
    return tree_attention(
        x.query, x.key, x.value, x.ancestors, x.lengths, format=x.format, block_table=x.table, key_scale=x.scale,
        value_scale=x.scale, backend=backend,
    ).output  # fmt: skip


def minimum(case: AttentionCase, x: AttentionInput, result: Tensor) -> int:
    """Bytes of queries, keys, values and ancestors, and of the result; latent values are keys."""
    return moved(x.query, x.key, None if case.cache == "latent" else x.value, x.ancestors, x.lengths, result)


def dense(x: AttentionInput) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, kv_head, position, dim]; pages are gathered, 8-bit numbers widened."""
    key, value = x.key, x.value
    if x.scale is not None:
        key, value = (t.to(x.query.dtype) * x.scale.to(x.query.dtype) for t in (key, value))
    if x.table is None:
        return key, value
    size = x.mask.shape[-1]
    key, value = (t[x.table].flatten(1, 2)[:, :size].transpose(1, 2) for t in (key, value))
    return key, value


def sdpa(x: AttentionInput) -> Tensor:
    """torch's attention under the dense mask."""
    key, value = dense(x)
    query = x.query.transpose(1, 2)
    return scaled_dot_product_attention(query, key, value, x.mask, enable_gqa=True).transpose(1, 2)


class Layer:
    """The attributes of a layer that transformers' attention functions read."""

    is_causal = True

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.num_key_value_groups = query.shape[1] // key.shape[1]


def transformers_sdpa(x: AttentionInput) -> Tensor:
    """The attention of a model in transformers, which repeats keys and values where there is a mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    key, value = dense(x)
    query = x.query.transpose(1, 2)
    out: Tensor = sdpa_attention_forward(Layer(query, key), query, key, value, x.mask)[0]
    return out


def grouped(x: AttentionInput) -> Tensor:
    """The attention of a model that `specdec_loop.generate` runs."""
    from specdec_loop.attention import grouped_sdpa

    key, value = dense(x)
    query = x.query.transpose(1, 2)
    return grouped_sdpa(Layer(query, key), query, key, value, x.mask)[0]


def eager(x: AttentionInput) -> Tensor:
    """Scores, softmax and sum one after the other, as models spell attention without a kernel."""
    key, value = (t[:, :, None] for t in dense(x))
    query = x.query.transpose(1, 2).unflatten(1, (key.shape[1], -1))  # [batch, kv_head, group, node, dim]
    scores = (query @ key.transpose(3, 4)) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~x.mask[:, :, None], -torch.inf).softmax(-1, dtype=torch.float32)
    return (weights.to(value.dtype) @ value).flatten(1, 2).transpose(1, 2)


def check(case: AttentionCase, run: Run, x: AttentionInput) -> None:
    """The reference within rounding."""
    error = (run(x).float() - ours(case, x, "reference").float()).abs().max()
    assert error <= TOLERANCE[x.query.dtype], f"error {error:.2g}"


def rivals(case: AttentionCase, made: Sequence[AttentionInput]) -> dict[str, Run]:
    """Attention under a dense mask."""
    return {
        "SDPA, dense mask": sdpa,
        "the loop's `grouped_sdpa`": grouped,
        "transformers' SDPA": transformers_sdpa,
        "plain PyTorch": eager,
    }
