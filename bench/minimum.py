"""MIN, bytes that a rule must read in the logits' own dtype (docs/design.md, Cost), and what is allowed above it."""

from __future__ import annotations

from . import compact_cache
from .caches import CacheCase, CacheInput
from .cases import Case
from .rows import ChainInput
from .trees import TreeCase


def minimum(case: Case | CacheCase | TreeCase, x: ChainInput | CacheInput, stats: bool = False) -> int:
    """Bytes that the rule must read on this input; of a cache, what must be read and written."""
    if isinstance(x, CacheInput):
        return compact_cache.minimum(x)
    assert isinstance(case, Case)
    batch, draft = x.draft_ids.shape
    row = x.target.shape[-1] * x.target.element_size()
    if case.op == "sample":
        return batch * row
    if case.op == "residual_sample":  # both log-sums first, then the difference
        return 4 * batch * row
    if case.op == "residual_probs":  # log-sums, then the mass, then the probabilities, which are written
        return 6 * batch * row + batch * x.target.shape[-1] * 4
    if case.op == "acceptance_ratios":  # both log-sums first, then sum min(p, q)
        return 4 * batch * draft * row
    target = batch * (draft + 1) * row
    if case.rule not in ("ratio", "block"):
        return target
    drafted = 0 if stats else batch * draft * row
    rejected = int((x.num_accepted < draft).sum())
    again = 2 * batch * (draft - 1) * row if case.rule == "block" else 0
    return target + drafted + 2 * rejected * row + again


def budget(case: Case | CacheCase | TreeCase) -> float:
    """Allowed multiple of MIN."""
    if isinstance(case, CacheCase):
        return 1.01
    if isinstance(case, TreeCase):
        return 1.1
    if case.filters == "none" or case.rule in ("greedy", "topm", "distance"):
        return 1.05
    return 1.3 if case.rows == "llm" else 2.4
