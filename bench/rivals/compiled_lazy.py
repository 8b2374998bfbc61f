"""torch.compile of the lazy eager spelling, shapes fixed."""

from __future__ import annotations

import functools
import shutil

import torch

from . import lazy

NAME = "compiled lazy"
WHY = "what Inductor makes of the least work PyTorch can do"
ORDER = 4


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


@functools.cache
def _compiled(name: str) -> object:
    return torch.compile(getattr(lazy, name), dynamic=False)


def verify_chain(*args: object) -> object:
    """As lazy.verify_chain."""
    return _compiled("verify_chain")(*args)  # type: ignore[operator]


def sample(*args: object) -> object:
    """As lazy.sample."""
    return _compiled("sample")(*args)  # type: ignore[operator]
