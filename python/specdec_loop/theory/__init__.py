"""The theory of speculative decoding as functions: counts, speed, optimal lengths, bounds. Torch float64, vectorised.

p is the target's law and q the draft's, here and everywhere in this package. Yin et al. write them the other way round.
"""

from .counts import (
    accepted_law,
    continuous_draft,
    expected_accepted,
    expected_tokens,
    operations,
    optimal_draft,
    recursion,
    speedup,
    throughput,
)
from .coupling import list_match_bound, match_bounds, match_probability, minhash_match
from .draft_sets import (
    best_tree,
    ceiling,
    greedy_multi_draft,
    k_sequential,
    set_acceptance,
    with_replacement,
    without_replacement,
)
from .rejections import (
    Markov,
    batch_rejections,
    bernoulli_improvement,
    loss,
    over_acceptance,
    rejections,
    total_variation,
    uniform_improvement,
)
from .tables import block_accepted, chain_accepted, ideal_accepted

__all__ = [
    "Markov",
    "accepted_law",
    "batch_rejections",
    "bernoulli_improvement",
    "best_tree",
    "block_accepted",
    "ceiling",
    "chain_accepted",
    "continuous_draft",
    "expected_accepted",
    "expected_tokens",
    "greedy_multi_draft",
    "ideal_accepted",
    "k_sequential",
    "list_match_bound",
    "loss",
    "match_bounds",
    "match_probability",
    "minhash_match",
    "operations",
    "optimal_draft",
    "over_acceptance",
    "recursion",
    "rejections",
    "set_acceptance",
    "speedup",
    "throughput",
    "total_variation",
    "uniform_improvement",
    "with_replacement",
    "without_replacement",
]
