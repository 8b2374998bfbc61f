"""Random but reproducible inputs of the ops, shaped like what an engine hands in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import RngKey, Sampling, sample, use_backend

FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_p": {"temperature": 1.1, "top_p": 0.8},
    "min_p": {"temperature": 0.9, "min_p": 0.08},
    "all": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
}
RULES = ("ratio", "block", "match", "greedy", "typical", "topm", "distance")


@dataclass
class ChainCase:
    """Arguments of one verify_chain call."""

    draft_ids: Tensor
    target_logits: Tensor
    draft_logits: Tensor | None
    keywords: dict[str, Any]

    def to(self, device: str) -> ChainCase:
        """The same case elsewhere."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device)
            if isinstance(value, (Sampling, RngKey)):
                return type(value)(*(move(v) for v in value))
            return tuple(move(v) for v in value) if isinstance(value, tuple) else value

        keywords = {name: move(value) for name, value in self.keywords.items()}
        return ChainCase(move(self.draft_ids), move(self.target_logits), move(self.draft_logits), keywords)


def make_rng(batch: int, first: int = 0) -> RngKey:
    """Distinct 64-bit seeds, positions and steps."""
    i = torch.arange(first, first + batch)
    return RngKey(seed=i * 0x9E3779B97F4A7C1 + 12345, position=3 + 7 * (i % 1000), step=i % 5)


def mixed_sampling(batch: int, filters: dict[str, float], greedy_every: int = 0) -> Sampling:
    """The same filters for all, with every n-th request greedy."""
    full = Sampling.full(batch, **filters)  # type: ignore[arg-type]
    if not greedy_every:
        return full
    t = torch.ones(batch) if full.temperature is None else full.temperature.clone()
    t[::greedy_every] = 0
    return full._replace(temperature=t)


def make_chain(
    batch: int,
    draft: int,
    vocab: int,
    *,
    rule: str = "ratio",
    filters: str = "none",
    dtype: torch.dtype = torch.float32,
    drafts: str = "model",
    ragged: bool = False,
    flat: bool = False,
    greedy_every: int = 0,
    closeness: float = 0.7,
    seed: int = 0,
) -> ChainCase:
    """A batch whose draft follows the target closely enough that prefixes of every length are accepted.

    `drafts`: "model" (drawn from draft rows), "stats" (the same, with draft_stats) or "point" (no draft rows).
    """
    g = torch.Generator().manual_seed(seed * 1000003 + batch * 31 + vocab)
    target = 2.5 * torch.randn(batch, draft + 1, vocab, generator=g)
    noisy = target[:, :draft] + closeness * torch.randn(batch, draft, vocab, generator=g)
    target, noisy = target.to(dtype), noisy.to(dtype)
    sampling = mixed_sampling(batch, FILTERS[filters], greedy_every)
    drafted = mixed_sampling(batch, FILTERS[filters])
    rng = make_rng(batch, first=seed * batch)
    purpose = "target" if rule == "match" else "draft"
    ids, logsumexp, threshold = [], [], []
    with use_backend("reference"):
        for i in range(draft):
            step = rng._replace(position=rng.position + i)
            drawn = sample(noisy[:, i], sampling=drafted, rng=step, purpose=purpose)
            ids.append(drawn.token_ids[:, 0])
            logsumexp.append(drawn.logsumexp)
            threshold.append(drawn.threshold)
    draft_ids = torch.stack(ids, 1) if draft else torch.zeros(batch, 0, dtype=torch.int64)
    stats = (torch.stack(logsumexp, 1), torch.stack(threshold, 1)) if draft else None
    keywords: dict[str, Any] = {"sampling": sampling, "rng": rng, "rule": rule}
    lengths = torch.full((batch,), draft)
    if ragged:
        lengths = torch.arange(batch) % (draft + 1)
        draft_ids = torch.where(torch.arange(draft) < lengths[:, None], draft_ids, -1)
    draft_logits: Tensor | None = noisy
    if drafts == "point":
        draft_logits = None
    else:
        keywords["draft_sampling"] = drafted
        if drafts == "stats" and stats is not None:
            keywords["draft_stats"] = stats
    if not flat:
        return ChainCase(draft_ids, target, draft_logits, keywords)
    inside = torch.arange(draft) < lengths[:, None]
    rows = torch.arange(draft + 1) <= lengths[:, None]
    keywords["cu_draft"] = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    keywords["max_draft"] = draft
    if "draft_stats" in keywords:
        keywords["draft_stats"] = tuple(s[inside] for s in keywords["draft_stats"])
    flat_draft = None if draft_logits is None else draft_logits[inside]
    return ChainCase(draft_ids[inside], target[rows], flat_draft, keywords)
