"""A batch of vLLM's requests: sampling parameters, random number keys, and which requests are served here.

A request that wants more than temperature, top-k, top-p, min-p, a seed, a grammar and what edits.py knows goes to
vLLM's own sampler, for all of its life: whether it is served depends on its SamplingParams alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Sampling

from . import edits

logger = logging.getLogger("vllm.specdec_kernels")
fallbacks: Counter[str] = Counter()  # requests left to vLLM, by reason

GREEDY = 1e-5  # temperatures below are greedy in vLLM
OWN_PROCESSORS = ("MinPLogitsProcessor", "LogitBiasLogitsProcessor", "MinTokensLogitsProcessor")


class Request(NamedTuple):
    """The fixed part of a request."""

    seed: int
    is_served: bool


class Batch(NamedTuple):
    """A batch in the order of its rows.

    Attributes:
        sampling: the parameters of each request.
        draft_sampling: the distribution its drafts are drawn from: the same, but the temperature alone where vLLM
            verifies.
        seed: int64 ``[batch]``.
        others: bool ``[batch]``, requests that vLLM serves; None: there are none.
    """

    sampling: Sampling
    draft_sampling: Sampling
    seed: Tensor
    others: Tensor | None


def reason_against(params: Any) -> str | None:
    """Why a request goes to vLLM's own sampler; None: it is served here."""
    if params is None:
        return "pooling"
    wants = {
        "a thinking budget": getattr(params, "thinking_token_budget", None) is not None,
        "log-probabilities": params.logprobs is not None or getattr(params, "logprob_token_ids", None),
    }
    if (reason := edits.reason_against(params)) is not None:
        return reason
    return next((reason for reason, is_wanted in wants.items() if is_wanted), None)


def leave(reason: str) -> None:
    """Count a request that is left to vLLM, and say so of the first for this reason."""
    if not fallbacks[reason]:
        logger.warning("specdec_kernels: requests with %s are left to vLLM's own sampler", reason)
    fallbacks[reason] += 1


def describe(request_id: str, params: Any, engine_seed: int) -> Request:
    """A request's seed and who serves it. Without a seed it gets one that every rank of the engine agrees on."""
    reason = reason_against(params)
    if reason is not None:
        leave(reason)
    if params is not None and params.seed is not None:
        return Request(params.seed, reason is None)
    digest = hashlib.blake2b(f"{engine_seed} {request_id}".encode(), digest_size=7).digest()
    return Request(int.from_bytes(digest, "big"), reason is None)


def known(runner: Any, request_id: str) -> Request:
    """`describe`, once a request."""
    state = runner.requests[request_id]
    found: Request | None = getattr(state, "specdec", None)
    if found is None:
        found = state.specdec = describe(request_id, state.sampling_params, runner.model_config.seed or 0)
    return found


def has_unknown_processors(metadata: Any) -> bool:
    """Whether logits processors are loaded whose effect is not known here."""
    names = {type(p).__name__ for p in metadata.logitsprocs.all}
    if unknown := names.difference(OWN_PROCESSORS):
        if not fallbacks["custom logits processors"]:
            logger.warning("specdec_kernels: %s: everything is left to vLLM's own sampler", ", ".join(sorted(unknown)))
        fallbacks["custom logits processors"] += 1
    return bool(unknown)


def min_p(metadata: Any, count: int) -> Tensor | None:
    """Of each request; None: nobody asks for it."""
    for processor in metadata.logitsprocs.argmax_invariant:
        if type(processor).__name__ == "MinPLogitsProcessor" and processor.min_p_count:
            found: Tensor = processor.min_p_device[:count]
            return found
    return None


def read(runner: Any, metadata: Any) -> Batch | None:
    """The runner's batch; None: vLLM serves all of it."""
    if has_unknown_processors(metadata):
        return None
    requests = [known(runner, name) for name in runner.input_batch.req_ids]
    count, device = len(requests), runner.device
    if metadata.temperature is None:
        temperature = torch.zeros(count, device=device)
    else:
        temperature = torch.where(metadata.temperature < GREEDY, 0.0, metadata.temperature)
    # Copies: vLLM writes the next batch into its own while a draft still waits for its verdict.
    top_k, top_p, least = (
        None if x is None else x.clone() for x in (metadata.top_k, metadata.top_p, min_p(metadata, count))
    )
    sampling = Sampling(temperature, top_k, top_p, least)
    draft_sampling, others = sampling, None
    if not all(r.is_served for r in requests):
        others = torch.tensor([not r.is_served for r in requests]).to(device, non_blocking=True)
        draft_sampling = Sampling(
            temperature,
            None if top_k is None else top_k.masked_fill(others, 0),
            None if top_p is None else top_p.masked_fill(others, 1.0),
            None if least is None else least.masked_fill(others, 0.0),
        )
    seed = torch.tensor([r.seed for r in requests], dtype=torch.int64).to(device, non_blocking=True)
    return Batch(sampling, draft_sampling, seed, others)
