"""FlashInfer's chain sampler: softmax and filters of every row to float32 probabilities, then one kernel."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Sampling

from .eager import scaled

NAME = "FlashInfer chain"
WHY = "FlashInfer's chain sampler, which TensorRT-LLM and others call"
ORDER = 10


def version() -> str:
    """Of the rival."""
    try:
        return f"flashinfer {metadata.version('flashinfer-python')}"
    except metadata.PackageNotFoundError:
        return "flashinfer, version unknown"


@functools.cache
def available() -> str | None:
    """None, or why it cannot run here."""
    if not torch.cuda.is_available():
        return "CUDA kernels only: timed on a GPU, and no meter sees inside them"
    try:
        import flashinfer.sampling  # noqa: F401
    except Exception as error:
        return f"flashinfer does not import: {type(error).__name__}: {error}"
    return None


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    return "no min-p" if "min-p" in case.filters else None


def prepare(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling) -> tuple[Any, ...]:
    """(target logits, draft probabilities, parameters); the drafter made its probabilities."""
    return target_logits, scaled(draft_logits, sampling).softmax(-1), sampling


def verify_prepared(draft_ids: Tensor, prepared: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """(token ids, number accepted)."""
    from flashinfer import sampling

    logits, draft_probs, (temperature, top_k, top_p, *_) = prepared
    batch, rows, vocab = logits.shape
    repeat = lambda x: x.repeat_interleave(rows)  # noqa: E731
    probs = sampling.softmax(logits.reshape(-1, vocab), repeat(temperature))
    if top_k is not None:
        probs = sampling.top_k_renorm_probs(probs, repeat(top_k))
    if top_p is not None:
        probs = sampling.top_p_renorm_probs(probs, repeat(top_p))
    ids, _, emitted = sampling.chain_speculative_sampling(draft_probs, draft_ids.int(), probs.view(batch, rows, vocab))
    return ids, emitted.long()
