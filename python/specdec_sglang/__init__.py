"""specdec_kernels inside SGLang: a plug-in (`sglang.srt.plugins`) that samples and verifies from raw logits.

SGLang finds it by itself where the package is installed. ``SGLANG_PLUGINS`` that does not
name ``specdec`` leaves it out. ``SPECDEC_SGLANG_RULE`` is ``match`` (default: a seeded text is the same with and
without speculation), ``target_only`` (SGLang's own rule), ``ratio`` or ``block``.
"""

from .plugin import register
from .requests import fallbacks

__all__ = ["fallbacks", "register"]
