"""Grammars: the ids that may follow a text, as xgrammar or llguidance know them, at every position of a draft."""

from .compiler import LIBRARIES, GrammarCompiler, Library
from .matching import DraftGrammars, Grammar, Masks, Matcher, TextGrammars, Walk, advance, fill_masks

__all__ = [
    "LIBRARIES",
    "DraftGrammars",
    "Grammar",
    "GrammarCompiler",
    "Library",
    "Masks",
    "Matcher",
    "TextGrammars",
    "Walk",
    "advance",
    "fill_masks",
]
