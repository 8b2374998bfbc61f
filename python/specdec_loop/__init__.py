"""Reference decoding loop on top of specdec_kernels, for Hugging Face transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .datastore import Datastore
    from .draft_length import AdaptiveLength
    from .drafters import (
        BlockDrafter,
        BlockTree,
        Blockwise,
        DraftModel,
        EagleDynamicTree,
        EagleTree,
        HeadChain,
        IndependentDrafts,
        Lookahead,
        Medusa,
        MedusaBestTree,
        ParallelChain,
        PromptLookup,
        Retrieval,
        SuffixDecoding,
        SuffixOr,
    )
    from .generation import Generation, generate
    from .grammar import GrammarCompiler
    from .prefix_cache import PrefixCache
    from .step_times import StepTimes
    from .tree_cache import TreeCache

_HOMES = {  # of all else: drafters
    "AdaptiveLength": "draft_length",
    "Datastore": "datastore",
    "Generation": "generation",
    "GrammarCompiler": "grammar",
    "PrefixCache": "prefix_cache",
    "StepTimes": "step_times",
    "TreeCache": "tree_cache",
    "generate": "generation",
}
__all__ = [
    "AdaptiveLength",
    "BlockDrafter",
    "BlockTree",
    "Blockwise",
    "Datastore",
    "DraftModel",
    "EagleDynamicTree",
    "EagleTree",
    "Generation",
    "GrammarCompiler",
    "HeadChain",
    "IndependentDrafts",
    "Lookahead",
    "Medusa",
    "MedusaBestTree",
    "ParallelChain",
    "PrefixCache",
    "PromptLookup",
    "Retrieval",
    "StepTimes",
    "SuffixDecoding",
    "SuffixOr",
    "TreeCache",
    "generate",
]


def __getattr__(name: str) -> object:
    """Import what needs transformers when it is first asked for: importing the package needs torch alone."""
    if name in __all__:
        return getattr(import_module(f".{_HOMES.get(name, 'drafters')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
