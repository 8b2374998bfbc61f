"""Lossless kernels for speculative decoding: raw logits in, token ids out, no probability tensor in between."""

from ._backends import available_backends, use_backend
from ._cache import CacheLayout
from ._random import random_words
from ._types import Noise, Sampling
from .ops.acceptance_ratios import RatioResult, acceptance_ratios
from .ops.compact_cache import compact_cache
from .ops.gather_nodes import GatherResult, gather_nodes
from .ops.residual_probs import ResidualProbs, residual_probs
from .ops.residual_sample import ResidualSample, residual_sample
from .ops.rollback import RollbackResult, rollback
from .ops.sample import SampleResult, sample
from .ops.select_state import select_state
from .ops.verify_chain import ChainResult, verify_chain

__all__ = [
    "CacheLayout",
    "ChainResult",
    "GatherResult",
    "Noise",
    "RatioResult",
    "ResidualProbs",
    "ResidualSample",
    "RollbackResult",
    "SampleResult",
    "Sampling",
    "acceptance_ratios",
    "available_backends",
    "compact_cache",
    "gather_nodes",
    "random_words",
    "residual_probs",
    "residual_sample",
    "rollback",
    "sample",
    "select_state",
    "use_backend",
    "verify_chain",
]
__version__ = "0.1.0"
