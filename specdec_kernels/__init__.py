"""Lossless kernels for speculative decoding: raw logits in, token ids out, no probability tensor in between."""

from ._backends import available_backends, use_backend
from ._random import random_words
from ._types import Noise, Sampling
from .ops.acceptance_ratios import RatioResult, acceptance_ratios
from .ops.residual_probs import ResidualProbs, residual_probs
from .ops.residual_sample import ResidualSample, residual_sample
from .ops.sample import SampleResult, sample
from .ops.verify_chain import ChainResult, verify_chain

__all__ = [
    "ChainResult",
    "Noise",
    "RatioResult",
    "ResidualProbs",
    "ResidualSample",
    "SampleResult",
    "Sampling",
    "acceptance_ratios",
    "available_backends",
    "random_words",
    "residual_probs",
    "residual_sample",
    "sample",
    "use_backend",
    "verify_chain",
]
__version__ = "0.1.0"
