"""Random but reproducible trees of candidates, shaped like what an engine hands in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cases import FILTERS, make_rng, mixed_sampling
from torch import Tensor

from specdec_kernels import RngKey, Sampling

TREE_RULES = ("match", "greedy", "typical", "recursive", "greedy_multi_draft", "target_only", "traversal")


@dataclass
class TreeCase:
    """Arguments of one verify_tree call."""

    token_ids: Tensor
    parents: Tensor
    target_logits: Tensor
    draft_logits: Tensor | None
    keywords: dict[str, Any]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.token_ids, self.parents, self.target_logits, self.draft_logits

    def to(self, device: str) -> TreeCase:
        """The same case elsewhere."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device)
            return type(value)(*map(move, value)) if isinstance(value, (Sampling, RngKey)) else value

        return TreeCase(*map(move, self.tensors), {name: move(value) for name, value in self.keywords.items()})

    def pick(self, order: Tensor) -> TreeCase:
        """The chosen requests, in this order."""

        def choose(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[order]
            return type(value)(*map(choose, value)) if isinstance(value, (Sampling, RngKey)) else value

        return TreeCase(*map(choose, self.tensors), {name: choose(value) for name, value in self.keywords.items()})


def random_parents(batch: int, nodes: int, max_depth: int, *, ragged: bool = False, seed: int = 0) -> Tensor:
    """int32 [batch, nodes]; ragged trees end in padding, the first of them right behind the root."""
    g = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, nodes), -1)
    for b in range(batch):
        depth = [0]
        for n in range(1, 1 + (b * 7 % nodes if ragged else nodes - 1)):
            open_nodes = [m for m in range(n) if depth[m] < max_depth]
            parent = open_nodes[int(torch.randint(len(open_nodes), (1,), generator=g))]
            parents[b, n] = parent
            depth.append(depth[parent] + 1)
    return parents.int()


def distinct_tokens(parents: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Ids [batch, nodes] drawn from the rows' distributions, siblings without replacement in node order."""
    uniform = torch.rand(rows.shape, generator=generator).clamp(min=1e-7)
    order = (rows.float() - (-uniform.log()).log()).argsort(dim=-1, descending=True)
    batch, nodes = parents.shape
    ids = torch.full((batch, nodes), -1)
    for b in range(batch):
        taken = [0] * nodes
        for n in range(1, nodes):
            parent = int(parents[b, n])
            if parent >= 0:
                ids[b, n] = order[b, parent, taken[parent] % rows.shape[-1]]
                taken[parent] += 1
    return ids


def make_tree(
    batch: int, nodes: int, vocab: int, *, max_depth: int = 4, rule: str = "recursive", filters: str = "none",
    drafts: str = "model", ragged: bool = False, greedy_every: int = 0, dtype: torch.dtype = torch.float32,
    closeness: float = 0.7, seed: int = 0,
) -> TreeCase:  # fmt: skip
    """A batch of trees whose candidates follow the target closely enough that paths of every length are accepted."""
    g = torch.Generator().manual_seed(seed * 1000003 + batch * 31 + vocab)
    target = 2.5 * torch.randn(batch, nodes, vocab, generator=g)
    noisy = target + closeness * torch.randn(batch, nodes, vocab, generator=g)
    parents = random_parents(batch, nodes, max_depth, ragged=ragged, seed=seed)
    ids = distinct_tokens(parents, noisy, g)
    keywords: dict[str, Any] = {
        "sampling": mixed_sampling(batch, FILTERS[filters], greedy_every),
        "draft_sampling": mixed_sampling(batch, FILTERS[filters]),
        "rng": make_rng(batch, first=seed * batch),
        "rule": rule,
        "max_depth": max_depth,
    }
    return TreeCase(ids, parents, target.to(dtype), noisy.to(dtype) if drafts == "model" else None, keywords)
