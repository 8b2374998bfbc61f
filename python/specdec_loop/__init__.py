"""Reference decoding loop on top of specdec_kernels, for Hugging Face transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tree_cache import TreeCache

__all__ = ["TreeCache"]


def __getattr__(name: str) -> object:
    """Import what needs transformers when it is first asked for: importing the package needs torch alone."""
    if name == "TreeCache":
        from .tree_cache import TreeCache

        return TreeCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
