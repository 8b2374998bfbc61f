"""Reference decoding loop on top of specdec_kernels, for Hugging Face transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .datastore import Datastore
    from .draft_length import AdaptiveLength
    from .drafters import (
        Blockwise,
        DraftModel,
        EagleDynamicTree,
        EagleTree,
        HeadChain,
        IndependentDrafts,
        Lookahead,
        Medusa,
        PromptLookup,
        Retrieval,
        SuffixDecoding,
        SuffixOr,
    )
    from .generation import Generation, generate
    from .prefix_cache import PrefixCache
    from .tree_cache import TreeCache

_HOMES = {
    "AdaptiveLength": "draft_length",
    "Blockwise": "drafters",
    "Datastore": "datastore",
    "DraftModel": "drafters",
    "EagleDynamicTree": "drafters",
    "EagleTree": "drafters",
    "Generation": "generation",
    "HeadChain": "drafters",
    "IndependentDrafts": "drafters",
    "Lookahead": "drafters",
    "Medusa": "drafters",
    "PrefixCache": "prefix_cache",
    "PromptLookup": "drafters",
    "Retrieval": "drafters",
    "SuffixDecoding": "drafters",
    "SuffixOr": "drafters",
    "TreeCache": "tree_cache",
    "generate": "generation",
}
__all__ = [
    "AdaptiveLength",
    "Blockwise",
    "Datastore",
    "DraftModel",
    "EagleDynamicTree",
    "EagleTree",
    "Generation",
    "HeadChain",
    "IndependentDrafts",
    "Lookahead",
    "Medusa",
    "PrefixCache",
    "PromptLookup",
    "Retrieval",
    "SuffixDecoding",
    "SuffixOr",
    "TreeCache",
    "generate",
]


def __getattr__(name: str) -> object:
    """Import what needs transformers when it is first asked for: importing the package needs torch alone."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
