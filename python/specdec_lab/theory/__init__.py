"""The theory of speculative decoding as functions: counts, speed, optimal lengths, bounds. Torch float64, vectorised.

p is the target's distribution and q the draft's, here and everywhere in this package. Yin et al. write them the other
way round.
"""

from specdec_loop.statistics import expected_accepted, expected_tokens

from .counts import (
    accepted_distribution,
    continuous_draft,
    operations,
    optimal_draft,
    recursion,
    speedup,
    throughput,
)
from .coupling import list_match_bound, match_bounds, match_floor, match_probability, minhash_match
from .draft_sets import (
    best_tree,
    ceiling,
    fastest_tree,
    greedy_multi_draft,
    k_sequential,
    set_acceptance,
    set_ceiling,
    with_replacement,
    without_replacement,
)
from .rejections import (
    Markov,
    batch_rejections,
    bernoulli_improvement,
    lenient,
    loss,
    output_distribution,
    over_acceptance,
    rejection_speedup,
    rejections,
    residuals,
    total_variation,
    uniform_improvement,
)
from .tables import block_accepted, block_chances, chain_accepted, ideal_accepted

__all__ = [
    "Markov",
    "accepted_distribution",
    "batch_rejections",
    "bernoulli_improvement",
    "best_tree",
    "block_accepted",
    "block_chances",
    "ceiling",
    "chain_accepted",
    "continuous_draft",
    "expected_accepted",
    "expected_tokens",
    "fastest_tree",
    "greedy_multi_draft",
    "ideal_accepted",
    "k_sequential",
    "lenient",
    "list_match_bound",
    "loss",
    "match_bounds",
    "match_floor",
    "match_probability",
    "minhash_match",
    "operations",
    "optimal_draft",
    "output_distribution",
    "over_acceptance",
    "recursion",
    "rejection_speedup",
    "rejections",
    "residuals",
    "set_acceptance",
    "set_ceiling",
    "speedup",
    "throughput",
    "total_variation",
    "uniform_improvement",
    "with_replacement",
    "without_replacement",
]
