"""Lossless kernels for speculative decoding: raw logits in, token ids out, no probability tensor in between."""

from ._backends import available_backends, use_backend
from ._cache import CacheLayout
from ._codes import (
    Backend,
    CacheFormat,
    ChainRule,
    DrawPurpose,
    Logprobs,
    MaskFormat,
    Purpose,
    RejectedFrom,
    Status,
    TreeEngine,
    TreeRule,
    explain_status,
)
from ._edits import Edits, RowEdits, TokenCounts
from ._mixed_rules import MixedRules
from ._random import race_noise, random_words
from ._sparse import SparseRows
from ._suffixes import SuffixDrafts, SuffixIndex, draft_suffixes
from ._tree_build import PathTree, tree_from_lookahead, tree_from_parents, tree_from_paths
from ._tree_links import LinkedTree, TreeLinks, tree_from_links, tree_links
from ._types import CandidateTree, RngKey, Sampling
from ._warmup import warmup
from .ops.acceptance_ratios import RatioResult, acceptance_ratios
from .ops.advance_state import advance_state
from .ops.advance_window import advance_window
from .ops.allocate_drafts import DraftAllocation, allocate_drafts
from .ops.compact_cache import compact_cache
from .ops.count_tokens import count_tokens
from .ops.edit_rows import edit_rows
from .ops.gather_nodes import GatherResult, gather_nodes
from .ops.residual_probs import ResidualProbs, residual_probs
from .ops.residual_sample import ResidualSample, residual_sample
from .ops.rollback import RollbackResult, rollback
from .ops.sample import SampleResult, sample
from .ops.select_state import select_state
from .ops.select_tree import select_tree
from .ops.token_logprobs import TokenLogprobs, token_logprobs
from .ops.tree_attention import TreeAttention, tree_attention
from .ops.tree_from_marginals import tree_from_marginals
from .ops.tree_from_sequences import tree_from_sequences
from .ops.tree_layout import TreeLayout, tree_layout
from .ops.tree_mask import TreeMask, tree_mask
from .ops.verify_chain import ChainResult, verify_chain
from .ops.verify_tree import TreeResult, verify_tree
from .ops.verify_tree.batch_sd import batch_sd

__all__ = [
    "Backend",
    "CacheFormat",
    "CacheLayout",
    "CandidateTree",
    "ChainResult",
    "ChainRule",
    "DraftAllocation",
    "DrawPurpose",
    "Edits",
    "GatherResult",
    "LinkedTree",
    "Logprobs",
    "MaskFormat",
    "MixedRules",
    "PathTree",
    "Purpose",
    "RatioResult",
    "RejectedFrom",
    "ResidualProbs",
    "ResidualSample",
    "RngKey",
    "RollbackResult",
    "RowEdits",
    "SampleResult",
    "Sampling",
    "SparseRows",
    "Status",
    "SuffixDrafts",
    "SuffixIndex",
    "TokenCounts",
    "TokenLogprobs",
    "TreeAttention",
    "TreeEngine",
    "TreeLayout",
    "TreeLinks",
    "TreeMask",
    "TreeResult",
    "TreeRule",
    "acceptance_ratios",
    "advance_state",
    "advance_window",
    "allocate_drafts",
    "available_backends",
    "batch_sd",
    "compact_cache",
    "count_tokens",
    "draft_suffixes",
    "edit_rows",
    "explain_status",
    "gather_nodes",
    "race_noise",
    "random_words",
    "residual_probs",
    "residual_sample",
    "rollback",
    "sample",
    "select_state",
    "select_tree",
    "token_logprobs",
    "tree_attention",
    "tree_from_links",
    "tree_from_lookahead",
    "tree_from_marginals",
    "tree_from_parents",
    "tree_from_paths",
    "tree_from_sequences",
    "tree_layout",
    "tree_links",
    "tree_mask",
    "use_backend",
    "verify_chain",
    "verify_tree",
    "warmup",
]
__version__ = "0.2.0"
