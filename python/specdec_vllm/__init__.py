"""specdec_kernels inside vLLM: a plug-in (`vllm.general_plugins`) that samples, verifies and drafts from raw logits.

vLLM finds it by itself where the package is installed. ``VLLM_PLUGINS`` that does not name
``specdec`` leaves it out. ``SPECDEC_VLLM_RULE`` is ``match`` (default: a seeded text is the same with and without
speculation), ``ratio`` or ``block``. ``SPECDEC_VLLM_SHARDED=1`` leaves logits with the ranks that made them.
"""

from .plugin import register
from .requests import fallbacks

__all__ = ["fallbacks", "register"]
