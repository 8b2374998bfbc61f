"""Inputs shared by the tests of residual_probs and residual_sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import FILTERS, mixed_sampling
from torch import Tensor

from specdec_kernels import RngKey, Sampling


def make_residual(
    batch: int,
    vocab: int,
    *,
    filters: str = "none",
    dtype: torch.dtype = torch.float32,
    a: float | Tensor = 1.0,
    b: float | Tensor = 1.0,
    greedy_every: int = 0,
) -> dict[str, Any]:
    """A target row and a draft row near it for each request."""
    g = torch.Generator().manual_seed(batch * 1009 + vocab)
    target = 2.5 * torch.randn(batch, vocab, generator=g)
    draft = target + torch.randn(batch, vocab, generator=g)
    return {
        "target_logits": target.to(dtype),
        "draft_logits": draft.to(dtype),
        "a": a,
        "b": b,
        "sampling": mixed_sampling(batch, FILTERS[filters], greedy_every),
        "draft_sampling": mixed_sampling(batch, FILTERS[filters]),
    }


def move(value: Any, device: str) -> Any:
    """Tensors, Sampling and RngKey on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(*(move(v, device) for v in value)) if isinstance(value, (Sampling, RngKey)) else value


def run(op: Callable[..., Any], device: str, case: dict[str, Any]) -> Any:
    """Call an op with the case's tensors on `device`."""
    return op(**{name: move(value, device) for name, value in case.items()})
