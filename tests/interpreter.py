"""Triton's interpreter, several times faster: `triton.language` is replaced once, not in every device call."""

from __future__ import annotations

import functools
from typing import Any


class _Kept:
    """A replacement that stays: no test of this process compiles for a GPU."""

    def restore(self) -> None:
        """Nothing is undone."""


def patch_once() -> None:
    """Call `_patch_lang` once for each function: nine tenths of a kernel of many small functions are spent in it."""
    try:
        from triton.runtime import interpreter
    except ImportError:  # no triton, no interpreter
        return

    patch = interpreter._patch_lang

    @functools.cache
    def once(function: Any) -> _Kept:
        patch(function)
        return _Kept()

    interpreter._patch_lang = once
