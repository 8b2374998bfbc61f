"""Exact distributions to hold samplers against, in float64, written from the definitions and not from the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Sampling

Filters = dict[str, float]


def processed(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Probabilities float64 ``[..., vocab]`` after temperature, min-p, top-k, top-p; ties at a threshold are kept."""
    logits = logits.double()
    vocab = logits.shape[-1]
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), vocab).double()
    p = (logits / temperature).softmax(-1)
    if min_p > 0:
        p = _kept(p, min_p * p.amax(-1, keepdim=True) * (1 - 1e-12))
    if 0 < top_k < vocab:
        p = _kept(p, p.topk(top_k, dim=-1).values[..., -1:])
    if top_p < 1:
        ranked = p.sort(dim=-1, descending=True).values
        enough = (ranked.cumsum(-1) >= top_p - 1e-12) | (ranked <= 0)
        last = enough.int().argmax(-1, keepdim=True)  # all of them where rounding leaves the sum short
        p = _kept(p, torch.where(enough.any(-1, keepdim=True), ranked.gather(-1, last), 0.0))
    return p


def _kept(p: Tensor, threshold: Tensor) -> Tensor:
    p = torch.where(p >= threshold, p, 0.0)
    return p / p.sum(-1, keepdim=True)


def sampling_of(filters: Filters, batch: int, device: torch.device | str = "cpu") -> Sampling:
    """The kernels' name for the same parameters."""
    return Sampling.full(batch, device=device, **filters)  # type: ignore[arg-type]


class Table(NamedTuple):
    """A target and a draft model that can be looked up: a row of logits for each context, and where each id leads.

    Attributes:
        target: float32 ``[contexts, vocab]``; context 0 is where every text begins.
        draft: float32 ``[contexts, vocab]``.
        after: int64 ``[contexts, vocab]``: the context after an id.
    """

    target: Tensor
    draft: Tensor
    after: Tensor

    @property
    def vocab(self) -> int:
        """Width of the rows."""
        return self.target.shape[1]

    def rows(self, logits: Tensor, contexts: Tensor) -> Tensor:
        """Rows ``[batch, nodes, vocab]`` of contexts ``[batch, nodes]``; not copied where all texts are in the same."""
        first = contexts[0]
        return logits[first].expand(len(contexts), -1, -1) if bool((contexts == first).all()) else logits[contexts]


def constant_table(p: Tensor, q: Tensor) -> Table:
    """The same two distributions everywhere."""
    rows = p.log().float()[None], q.log().float()[None]
    return Table(*rows, torch.zeros(1, len(p), dtype=torch.int64))


def random_table(vocab: int, length: int, seed: int, spread: float = 1.2) -> Table:
    """Rows that depend on the whole history of up to `length` tokens, then the text begins anew.

    The draft is half the target and half noise, so that prefixes of every length are accepted.
    """
    g = torch.Generator().manual_seed(seed)
    contexts = sum(vocab**n for n in range(length))
    target = spread * torch.randn(contexts, vocab, generator=g)
    draft = 0.5 * target + spread * torch.randn(contexts, vocab, generator=g)
    return Table(target, draft, tree_of_histories(vocab, length))


def tree_of_histories(vocab: int, length: int) -> Tensor:
    """`after` of a `Table` with a context for each history of fewer than `length` tokens, in order of their lengths."""
    contexts = sum(vocab**n for n in range(length))
    child = torch.arange(contexts)[:, None] * vocab + 1 + torch.arange(vocab)
    return torch.where(child < contexts, child, 0)


def flat_table(target: Tensor, draft: Tensor) -> Table:
    """Row i holds for the i-th token whatever came before it, as long as there are rows; then they start again."""
    after = (torch.arange(len(target)) + 1) % len(target)
    return Table(target.float(), draft.float(), after[:, None].expand(-1, target.shape[1]).contiguous())


def joint_distribution(table: Table, length: int, filters: Filters, *, of: str = "target") -> tuple[Tensor, Tensor]:
    """(keys int64, probabilities): the first `length` tokens as one number to the base vocab; sorted by key."""
    p = processed(table.target if of == "target" else table.draft, **filters)  # type: ignore[arg-type]
    keys = contexts = torch.zeros(1, dtype=torch.int64)
    distribution = torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        distribution = (distribution[:, None] * p[contexts]).flatten()
        keys = (keys[:, None] * table.vocab + torch.arange(table.vocab)).flatten()
        contexts = table.after[contexts].flatten()
        alive = distribution > 0
        distribution, keys, contexts = distribution[alive], keys[alive], contexts[alive]
    return keys, distribution


def distribution_of(keys: Tensor, table: Table, length: int, rows: Tensor) -> Tensor:
    """Probabilities of the texts named by keys, from `rows` ``[contexts, vocab]``, one row a context of the table."""
    share, context = torch.ones(len(keys), dtype=torch.float64), torch.zeros_like(keys)
    for place in reversed(range(length)):
        x = keys // table.vocab**place % table.vocab
        share, context = share * rows[context, x], table.after[context, x]
    return share


def joint_counts(tokens: Tensor, vocab: int, keys: Tensor) -> Tensor:
    """How often each key occurred among texts ``[n, length]``; one more cell, at the end, counts all others."""
    weights = vocab ** torch.arange(tokens.shape[1] - 1, -1, -1, device=tokens.device)
    seen = (tokens * weights).sum(1).cpu()
    place = torch.searchsorted(keys, seen).clamp(max=len(keys) - 1)
    is_text = ((tokens >= 0) & (tokens < vocab)).all(1).cpu()  # [1, -1] has the number of [0, vocab - 1]
    known = (keys[place] == seen) & is_text & bool(len(keys))
    return torch.bincount(torch.where(known, place, len(keys)), minlength=len(keys) + 1)
