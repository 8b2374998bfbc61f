"""Inside transformers: a speculative decoding method for its `generate`, an exact verification for its own."""

from .decoding import generate
from .verification import patched, speculative_sampling

__all__ = ["generate", "patched", "speculative_sampling"]
