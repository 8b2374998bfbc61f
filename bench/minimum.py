"""MIN, bytes that must move in the logits' own dtype (docs/design.md, Cost), and what is allowed above it.

Of an op on trees or caches, MIN is `minimum` of its own file: what a call must read and write.
"""

from __future__ import annotations

from torch import Tensor

from .cases import Case, OpCase
from .meters import size
from .rows import ChainInput

# Allowed multiples of MIN, beside what `near` of an op's file allows. Sequences of a trie are passed over again to sort
# and to compare them; the parts of a split attention are written, read and merged. Each row of edit_rows walks its
# request's lists, which MIN has once, three times. Ranked candidates are written once, and read as nodes are chosen.
# Triton's compare-and-swap has no mask: in count_tokens 256 lanes swap for the 6 tokens of a request.
BUDGETS = {
    "verify_tree": 1.1,
    "compact_cache": 1.01,
    "gather_nodes": 1.01,
    "select_state": 1.01,
    "advance_state": 1.1,
    "advance_window": 1.05,
    "rollback": 1.25,
    "select_tree": 1.1,
    "tree_from_sequences": 3.5,
    "tree_from_marginals": 2.5,
    "tree_layout": 1.02,
    "tree_mask": 1.05,
    "tree_attention": 1.55,
    "allocate_drafts": 1.1,
    "edit_rows": 4.1,
    "count_tokens": 53.0,
}


def moved(*tensors: Tensor | None) -> int:
    """Bytes of tensors that are read or written once, where there are any."""
    return sum(size(t) for t in tensors if t is not None)


def minimum(case: Case, x: ChainInput, stats: bool = False) -> int:
    """Bytes that the rule must read on these rows."""
    batch, draft = x.draft_ids.shape
    row = x.target.shape[-1] * x.target.element_size()
    if case.op in ("sample", "token_logprobs"):
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


def budget(case: OpCase) -> float:
    """Allowed multiple of MIN."""
    if not isinstance(case, Case):
        return BUDGETS[case.op]
    is_filtered = case.filters != "none" and case.rule not in ("greedy", "topm", "distance")
    return row_budget(case.filters if is_filtered else "none", case.rows, case.vocab)


# A draw looks into 32 blocks of 64 ids and a few more; one from a residual, whose bounds fall slowly, into more of both
# rows: 14 to 109 on average.
DRAWN, DRAWN_RESIDUAL = 6 * 1024, 40 * 1024


def draws(case: Case) -> int:
    """Bytes that the draws of a call may read beside the digests of its rows."""
    if case.op in ("residual_sample", "residual_probs"):
        return case.batch * DRAWN_RESIDUAL
    if case.op != "verify_chain":
        return case.batch * DRAWN
    rows = (
        case.draft + 1 if case.rule in ("match", "typical") else 0 if case.rule in ("greedy", "topm", "distance") else 1
    )
    return case.batch * rows * DRAWN


def row_budget(filters: str, shape: str, vocab: int) -> float:
    """Allowed multiple of MIN on rows of logits of a shape.

    Top-p alone may keep a fifth of a language model's row. The blocks that top-k looks into are as many however few ids
    a row has: of 32,000 they are a larger part.
    """
    if filters == "none":
        return 1.05
    if shape != "llm" or "top-p" in filters.split(" + ")[0]:
        return 2.4
    return 1.3 if vocab >= 64000 else 1.5
