"""The entry point that vLLM calls in every process, as often as it likes."""

from __future__ import annotations

import os

RULES = ("match", "ratio", "block")


def rule() -> str:
    """SPECDEC_VLLM_RULE."""
    name = os.environ.get("SPECDEC_VLLM_RULE", "match")
    if name not in RULES:
        raise ValueError(f"SPECDEC_VLLM_RULE must be one of {', '.join(RULES)}, got {name!r}")
    return name


def register() -> None:
    """Put the package's sampler, verifier and draft sampler in the place of vLLM's."""
    from . import v1, v2

    chosen = rule()
    v1.install(chosen)
    v2.install(chosen)
