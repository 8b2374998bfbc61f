"""Replacing methods of vLLM's classes, so that a second registration changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def replace(owner: type | ModuleType, name: str, ours: Callable[..., Any]) -> None:
    """Method or function `name` becomes ours, which is handed vLLM's first."""
    theirs = original(owner, name)

    @functools.wraps(theirs)
    def method(*args: Any, **keywords: Any) -> Any:
        return ours(theirs, *args, **keywords)

    method.vllm_method = theirs  # type: ignore[attr-defined]
    setattr(owner, name, method)


def original(owner: type | ModuleType, name: str) -> Callable[..., Any]:
    """The method as vLLM wrote it."""
    present: Callable[..., Any] = getattr(owner, name)
    return getattr(present, "vllm_method", present)
