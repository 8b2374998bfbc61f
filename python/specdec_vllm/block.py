"""`method: "dflash"` is vLLM's own block drafter, in both model runners; its drafts are drawn as those of any head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from .patch import replace


def install() -> None:
    """Patch the class, once."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    replace(DFlashQwen3Model, "_normalize_context_k", normed)


def normed(theirs: Callable[..., Any], model: Any, keys: Tensor) -> Tensor:
    """`_normalize_context_k`, ``[layers, ...]``. On a CPU, vLLM 0.32 norms all of them by the weights of the first."""
    if keys.device.type != "cpu":
        found: Tensor = theirs(model, keys)
        return found
    layers = zip(keys, model._k_norm_weights, strict=True)
    return torch.stack([rms_norm(own, weight.shape, weight, model._rms_norm_eps) for own, weight in layers])
