"""torch.compile of the plain eager spelling."""

from __future__ import annotations

from . import eager
from ._compiled import available, compiled, supports, version

__all__ = ["NAME", "ORDER", "WHY", "available", "sample", "supports", "verify_chain", "version"]

NAME = "compiled eager"
WHY = "`PyTorch` under `torch.compile`"
ORDER = 3

verify_chain = compiled(eager.verify_chain)
sample = compiled(eager.sample)
