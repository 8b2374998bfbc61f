"""Drafters, one small file each; `base` says what the loop asks of them."""

from .base import Draft, Drafter, NoDrafter, Outcome, Part
from .block import BlockDrafter, BlockTree
from .draft_model import DraftModel
from .eagle_dynamic_tree import EagleDynamicTree
from .eagle_tree import EagleTree
from .head_chain import HeadChain
from .independent import IndependentDrafts
from .lookahead import Lookahead
from .medusa import Blockwise, Medusa, MedusaBestTree
from .parallel_chain import ParallelChain
from .prompt_lookup import PromptLookup
from .retrieval import Retrieval
from .suffix import SuffixDecoding
from .suffix_or import SuffixOr

__all__ = [
    "BlockDrafter",
    "BlockTree",
    "Blockwise",
    "Draft",
    "DraftModel",
    "Drafter",
    "EagleDynamicTree",
    "EagleTree",
    "HeadChain",
    "IndependentDrafts",
    "Lookahead",
    "Medusa",
    "MedusaBestTree",
    "NoDrafter",
    "Outcome",
    "ParallelChain",
    "Part",
    "PromptLookup",
    "Retrieval",
    "SuffixDecoding",
    "SuffixOr",
]
