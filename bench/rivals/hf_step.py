"""transformers' verification step as `_assisted_decoding` composes it: cast, processors row by row, sampling."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import hf
from .hf import available, supports, version

__all__ = ["available", "supports", "version"]
NAME = "transformers with processors"
WHY = "`transformers` with the cast and the logits processors that its assisted decoding runs before"
ORDER = 6


@functools.cache
def _processors(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> Any:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = [TemperatureLogitsWarper(temperature)]
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p else []
    chain += [MinPLogitsWarper(min_p)] if min_p else []
    return LogitsProcessorList(chain)


def verify_step(
    draft_ids: Tensor, target_logits: Tensor, drafted: Tensor, filters: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Target logits raw, draft logits processed (the assistant's own decoding did that)."""
    processors = _processors(*filters)
    target = target_logits.to(dtype=torch.float32, copy=True)
    for i in range(target.shape[1]):
        target[:, i, :] = processors(draft_ids[:, :i], target[:, i, :])
    return hf.verify_prepared(draft_ids, (target, drafted))
