"""A batch of vLLM's requests: sampling parameters, random number keys, and which requests are served here.

A request that wants more than temperature, top-k, top-p, min-p, a seed, a grammar, log-probabilities and what edits.py
knows goes to vLLM's own sampler, for all of its life: whether it is served depends on its SamplingParams alone.
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
RANDOM = len("-0123abcd")  # what vLLM adds to a request's id
MOST_LOGPROBS = 128  # ids of a row that an op lists
LOSSY = ("synthetic", "fly")  # of vLLM's acceptance rules: texts do not follow the target's distribution
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
    if getattr(params, "thinking_token_budget", None) is not None:
        return "a thinking budget"
    return edits.reason_against(params)


def reason_against_logprobs(params: Any, mode: str) -> str | None:
    """Why log-probabilities of an engine's `logprobs_mode` come from vLLM in the V1 runner; None: from here."""
    if getattr(params, "logprob_token_ids", None):
        return "log-probabilities of chosen ids"
    if params.logprobs is None:
        return None
    if mode != "raw_logprobs":
        return mode
    if not 0 <= params.logprobs <= MOST_LOGPROBS:
        return f"log-probabilities of over {MOST_LOGPROBS} ids"
    # vLLM lists ids that the grammar forbids where too few are left, our ops none.
    return None if params.structured_outputs is None else "log-probabilities and a grammar"


def reason_against_acceptance(config: Any) -> str | None:
    """Why an engine of this SpeculativeConfig, None without speculation, is vLLM's; None: it is served here."""
    method = getattr(config, "rejection_sample_method", None)
    return f"{method} acceptance" if method in LOSSY else None


def leave(reason: str, names: str = "") -> None:
    """Count a request that is left to vLLM, and say so of the first for this reason; `names`: of what it is due to."""
    if not fallbacks[reason]:
        more = f" ({names})" if names else ""
        logger.warning("specdec_kernels: requests with %s%s are left to vLLM's own sampler", reason, more)
    fallbacks[reason] += 1


def describe(runner: Any, request_id: str, params: Any) -> Request:
    """A request's seed and who serves it. Without a seed it gets one on which all ranks, and the next run, agree."""
    config = runner.model_config
    reason = reason_against_acceptance(runner.speculative_config) or reason_against(params)
    reason = reason or reason_against_logprobs(params, config.logprobs_mode)
    if reason is not None:
        leave(reason)
    if params is not None and params.seed is not None:
        seed = (params.seed + 2**63) % 2**64 - 2**63  # copies of a request count upwards from its seed
        return Request(seed, reason is None)
    from vllm import envs

    if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        request_id = request_id[:-RANDOM]  # each process that has a scheduler ends ids at random
    digest = hashlib.blake2b(f"{config.seed or 0} {request_id}".encode(), digest_size=7).digest()
    return Request(int.from_bytes(digest, "big"), reason is None)


def known(runner: Any, request_id: str) -> Request:
    """`describe`, once a request."""
    state = runner.requests[request_id]
    found: Request | None = getattr(state, "specdec", None)
    if found is None:
        found = state.specdec = describe(runner, request_id, state.sampling_params)
        unknown = unknown_processors(runner.input_batch.sampling_metadata)
        if unknown and found.is_served:
            leave("custom logits processors", ", ".join(sorted(unknown)))
    return found


def are_served(runner: Any) -> bool:
    """Whether all requests of the batch are served here."""
    batch = runner.input_batch
    requests = [known(runner, name) for name in batch.req_ids]
    return not unknown_processors(batch.sampling_metadata) and all(r.is_served for r in requests)


def unknown_processors(metadata: Any) -> set[str]:
    """Logits processors that are loaded, for every request, and whose effect is not known here."""
    return {type(p).__name__ for p in metadata.logitsprocs.all}.difference(OWN_PROCESSORS)


def min_p(metadata: Any, count: int) -> Tensor | None:
    """Of each request; None: nobody asks for it."""
    for processor in metadata.logitsprocs.argmax_invariant:
        if type(processor).__name__ == "MinPLogitsProcessor" and processor.min_p_count:
            found: Tensor = processor.min_p_device[:count]
            return found
    return None


def read(runner: Any, metadata: Any) -> Batch | None:
    """The runner's batch; None: vLLM serves all of it."""
    requests = [known(runner, name) for name in runner.input_batch.req_ids]
    if unknown_processors(metadata) or reason_against_acceptance(runner.speculative_config) is not None:
        return None
    count, device = len(requests), runner.device
    if metadata.temperature is None:
        temperature = torch.zeros(count, dtype=torch.float32, device=device)
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
