"""Reference decoding loop on top of specdec_kernels, for Hugging Face transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .datastore import Datastore
    from .draft_length import AdaptiveLength
    from .drafters import DraftModel, IndependentDrafts, Lookahead, PromptLookup, Retrieval, SuffixDecoding
    from .generation import Generation, generate
    from .past import Past
    from .tree_cache import TreeCache

_HOMES = {
    "AdaptiveLength": "draft_length",
    "Datastore": "datastore",
    "DraftModel": "drafters",
    "Generation": "generation",
    "IndependentDrafts": "drafters",
    "Lookahead": "drafters",
    "Past": "past",
    "PromptLookup": "drafters",
    "Retrieval": "drafters",
    "SuffixDecoding": "drafters",
    "TreeCache": "tree_cache",
    "generate": "generation",
}
__all__ = [
    "AdaptiveLength",
    "Datastore",
    "DraftModel",
    "Generation",
    "IndependentDrafts",
    "Lookahead",
    "Past",
    "PromptLookup",
    "Retrieval",
    "SuffixDecoding",
    "TreeCache",
    "generate",
]


def __getattr__(name: str) -> object:
    """Import what needs transformers when it is first asked for: importing the package needs torch alone."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
