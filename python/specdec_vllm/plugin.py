"""The entry point that vLLM calls in every process, as often as it likes."""

from __future__ import annotations

import functools
import os

from specdec_kernels import ChainRule

from .requests import logger

SUPPORTED = ("0.32", "0.33")  # of vLLM: the methods that are replaced are its own affair, and change between versions
RULES: tuple[ChainRule, ...] = ("match", "ratio", "block")


def rule() -> ChainRule:
    """SPECDEC_VLLM_RULE."""
    name = os.environ.get("SPECDEC_VLLM_RULE", "match")
    for known in RULES:
        if name == known:
            return known
    raise ValueError(f"SPECDEC_VLLM_RULE must be one of {', '.join(RULES)}, got {name!r}")


def is_sharded() -> bool:
    """SPECDEC_VLLM_SHARDED."""
    wanted = os.environ.get("SPECDEC_VLLM_SHARDED", "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"SPECDEC_VLLM_SHARDED must be 0 or 1, got {wanted!r}")
    return wanted == "1"


@functools.cache
def is_supported(version: str) -> bool:
    """Whether the plug-in knows this version of vLLM; says once where it does not."""
    if ".".join(version.split(".")[:2]) in SUPPORTED:
        return True
    known = " and ".join(SUPPORTED)
    logger.warning("specdec_kernels: the plug-in is for vLLM %s and leaves vLLM %s as it is", known, version)
    return False


def register() -> None:
    """Put the package's sampler, verifier, draft sampler and suffix drafter in the place of vLLM's."""
    import vllm

    if not is_supported(vllm.__version__):
        return
    from . import block, shards, suffix, v1, v2

    chosen = rule()
    v1.install(chosen)
    v2.install(chosen)
    suffix.install()
    block.install()
    if is_sharded():
        shards.install()
