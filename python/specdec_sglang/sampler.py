"""Plain sampling: `Sampler.forward`, for prompts and for steps without drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import RngKey, sample

from .requests import NO_SEEDS, leave, parameters, seeds_of


def reason_against(sampler: Any, logits: Tensor, info: Any, positions: Tensor, logprob_logits: Any) -> str | None:
    """Why a batch goes to SGLang's own sampler; None: it is served here."""
    reasons = {
        NO_SEEDS: seeds_of(info) is None,
        "sampling masks": info.sampling_mask_batch_indices is not None,
        "watermarks": info.has_watermark_candidates or logprob_logits is not None,
        "an on-policy target of reinforcement learning": sampler.rl_on_policy_target is not None,
        "padded rows": not len(logits) == len(info) == len(positions),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def sampled(
    theirs: Callable[..., Any],
    sampler: Any,
    logits_output: Any,
    info: Any,
    return_logprob: bool,
    top_logprobs_nums: Any,
    token_ids_logprobs: Any,
    positions: Tensor,
    *,
    logprob_logits: Tensor | None = None,
) -> Tensor:
    """`Sampler.forward`: int32 ids ``[batch]``; the last token's position is given, ours is the next."""
    logits = logits_output.next_token_logits
    reason = reason_against(sampler, logits, info, positions, logprob_logits)
    if reason is not None:
        leave(reason)
        named = {} if logprob_logits is None else {"logprob_logits": logprob_logits}
        arguments = (logits_output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
        found: Tensor = theirs(sampler, *arguments, **named)
        return found
    seed = seeds_of(info)
    assert seed is not None
    logits = sampler._preprocess_logits(logits, info)
    rng = RngKey(seed, positions.long() + 1)
    drawn = sample(logits, sampling=parameters(info), rng=rng, purpose="target")
    # A row of NaN has no token; the engine must be given one of its vocabulary.
    ids = drawn.token_ids[:, 0].clamp(min=0).int()
    if return_logprob:
        result = sampler.output_logprob_processor.compute_logprobs(
            logprobs(logits, info), top_logprobs_nums, token_ids_logprobs, ids
        )
        result.write_output_to(logits_output)
    sampler._sync_token_ids_across_tp(ids, info)
    return ids


def logprobs(logits: Tensor, info: Any) -> Tensor:
    """As SGLang defines them: of the temperature, without filters; of the model alone where it is told so."""
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

    if not info.is_all_greedy and not SGLANG_RETURN_ORIGINAL_LOGPROB:
        logits = logits / info.temperatures
    return torch.log_softmax(logits, dim=-1)
