"""torch.compile of the plain eager spelling."""

from __future__ import annotations

from . import eager
from ._compiled import available, compiled, supports, version

__all__ = ["NAME", "ORDER", "WHY", "available", "sample", "supports", "verify_chain", "version"]

NAME = "compiled eager"
WHY = "what Inductor makes of the textbook algorithm"
ORDER = 3

verify_chain = compiled(eager.verify_chain)
sample = compiled(eager.sample)
