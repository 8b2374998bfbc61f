"""Drafters, one small file each; `base` says what the loop asks of them."""

from .base import Draft, Drafter, NoDrafter, Outcome
from .draft_model import DraftModel
from .lookahead import Lookahead
from .prompt_lookup import PromptLookup
from .suffix import SuffixDecoding

__all__ = [
    "Draft",
    "DraftModel",
    "Drafter",
    "Lookahead",
    "NoDrafter",
    "Outcome",
    "PromptLookup",
    "SuffixDecoding",
]
