"""torch.compile of the lazy eager spelling."""

from __future__ import annotations

from . import lazy
from ._compiled import available, compiled, supports, version

__all__ = ["NAME", "ORDER", "WHY", "available", "sample", "supports", "verify_chain", "version"]

NAME = "compiled lazy"
WHY = "`lean PyTorch` under `torch.compile`"
ORDER = 4

verify_chain = compiled(lazy.verify_chain)
sample = compiled(lazy.sample)
