"""Draft rows of which only the candidates are kept, made of dense ones."""

from __future__ import annotations

import torch
from cases import ChainCase
from torch import Tensor
from tree_cases import TreeCase

from specdec_kernels import SparseRows

INF = float("inf")


def sparse_of(rows: Tensor, k: int, drawn: Tensor, temperature: Tensor, dtype: torch.dtype = torch.int64) -> SparseRows:
    """The k - 2 likeliest candidates of rows [batch, n, vocab] and the drafted ids, shuffled and padded to k."""
    batch, n, vocab = rows.shape
    wanted = torch.zeros(batch, n, vocab + 1, dtype=torch.bool)
    wanted.scatter_(2, rows.float().topk(k - 2, dim=2).indices, True)
    wanted.scatter_(2, torch.where(drawn >= 0, drawn, vocab), True)
    g = torch.Generator().manual_seed(k)
    order = torch.rand(wanted[..., :-1].shape, generator=g).masked_fill(~wanted[..., :-1], INF).argsort(2)[..., :k]
    kept = wanted.gather(2, order)
    logits = torch.where(kept, rows.gather(2, order), -INF)
    return SparseRows(
        torch.where(kept, order, -1).to(dtype), logits, (logits.float() / temperature[:, None, None]).logsumexp(2)
    )


def sparse_chain(case: ChainCase, k: int, dtype: torch.dtype = torch.int64) -> SparseRows:
    assert case.draft_logits is not None
    temperature = case.keywords["draft_sampling"].temperature
    temperature = torch.ones(len(case.draft_ids)) if temperature is None else temperature
    return sparse_of(case.draft_logits, k, case.draft_ids[..., None], temperature, dtype)


def sparse_tree(case: TreeCase, k: int) -> SparseRows:
    """Candidates of every node: of some requests the third child and later ones are not kept."""
    assert case.draft_logits is not None
    nodes = torch.arange(case.parents.shape[1])
    children = (case.parents[:, None] == nodes[:, None]) & (case.token_ids[:, None] >= 0)
    drawn = torch.where(children, case.token_ids[:, None], -1)  # [batch, node, its children]
    drawn[::4, :, 2:] = -1
    return sparse_of(case.draft_logits, k, drawn, case.keywords["draft_sampling"].temperature)
