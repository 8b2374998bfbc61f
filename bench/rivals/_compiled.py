"""torch.compile of another rival's functions, shapes fixed: what Inductor makes of them."""

from __future__ import annotations

import shutil
from types import ModuleType

import torch


class Compiled:
    """As a module of a rival; functions are compiled at their first call."""

    def __init__(self, rival: ModuleType, name: str, why: str, order: int) -> None:
        self.NAME, self.WHY, self.ORDER = name, why, order
        self.verify_chain = torch.compile(rival.verify_chain, dynamic=False)
        self.sample = torch.compile(rival.sample, dynamic=False)
        self.version = rival.version

    def available(self) -> str | None:
        """None, or why it cannot run here."""
        if torch.cuda.is_available() or shutil.which("g++") or shutil.which("clang++"):
            return None
        return "Inductor needs a C++ compiler"

    def supports(self, case: object) -> str | None:
        """None, or why the case is not for it."""
        return None if getattr(case, "compiled", False) else "compiled only where a case asks for it"
