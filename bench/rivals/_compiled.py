"""torch.compile of another rival's functions, shapes fixed: what Inductor makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def version() -> str:
    """Of the rival."""
    return f"torch {torch.__version__}"


def available() -> str | None:
    """None, or why it cannot run here."""
    if torch.cuda.is_available() or shutil.which("g++") or shutil.which("clang++"):
        return None
    return "Inductor needs a C++ compiler"


def supports(case: object) -> str | None:
    """None, or why the case is not for it."""
    return None if getattr(case, "compiled", False) else "compiled only where a case asks for it"


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled at its first call."""
    return torch.compile(function, dynamic=False)
