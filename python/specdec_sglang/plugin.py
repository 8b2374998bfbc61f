"""The entry point that SGLang calls in every process."""

from __future__ import annotations

import functools
import os
from typing import Literal, TypeAlias

Rule: TypeAlias = Literal["match", "target_only", "ratio", "block"]
RULES: tuple[Rule, ...] = ("match", "target_only", "ratio", "block")


def rule() -> Rule:
    """SPECDEC_SGLANG_RULE."""
    name = os.environ.get("SPECDEC_SGLANG_RULE", "match")
    for known in RULES:
        if name == known:
            return known
    # SGLang logs an exception of a plug-in, and would go on without it.
    raise SystemExit(f"SPECDEC_SGLANG_RULE must be one of {', '.join(RULES)}, got {name!r}")


@functools.cache  # a second registration would hook the hooks
def register() -> None:
    """Hook SGLang's sampler and verifier, and what its batches carry of each request."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import requests, sampler, verifier

    chosen = rule()
    info = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    HookRegistry.register(f"{info}.adjusted_from_schedule_batch", requests.made, HookType.AFTER)
    HookRegistry.register(f"{info}.adjusted_filter_batch", requests.filtered, HookType.AFTER)
    HookRegistry.register(f"{info}.adjusted_merge_batch", requests.merged, HookType.AFTER)
    HookRegistry.register(f"{info}.copy_for_forward", requests.copied, HookType.AFTER)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(f"{manager}._send_one_request", requests.numbered, HookType.BEFORE)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", sampler.sampled, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.speculative.eagle_utils.eagle_sample",
        functools.partial(verifier.verified, chosen),
        HookType.AROUND,
    )
