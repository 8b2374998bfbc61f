"""Drafters, one small file each; `base` says what the loop asks of them."""

from .base import Draft, Drafter, NoDrafter, Outcome
from .draft_model import DraftModel
from .independent import IndependentDrafts
from .lookahead import Lookahead
from .prompt_lookup import PromptLookup
from .retrieval import Retrieval
from .suffix import SuffixDecoding

__all__ = [
    "Draft",
    "DraftModel",
    "Drafter",
    "IndependentDrafts",
    "Lookahead",
    "NoDrafter",
    "Outcome",
    "PromptLookup",
    "Retrieval",
    "SuffixDecoding",
]
