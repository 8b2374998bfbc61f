"""How many tokens a step should yield: each method's exact acceptance, to be held beside what was measured."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from .exact import Filters, Table, processed
from .procedures import Procedure

ENUMERABLE = 100_000


def expected_tokens(method: Procedure, table: Table, filters: Filters) -> float | None:
    """Tokens of a first step, accepted ones and the drawn one; None where theory has no closed form (traversal, a cut).

    Nor has block verification: its drafts are enumerated, where there are at most `ENUMERABLE`.

    E(context, level) = sum_x a_x (1 + E(after x, level + 1)), a_x the probability that a child with id x is accepted.
    """
    if method.rule == "traversal" or method.keep is not None:
        return None
    p, q = (processed(rows, **filters) for rows in (table.target, table.draft))  # type: ignore[arg-type]
    if method.drawn is not None:
        q = processed(table.draft, **method.drawn)  # type: ignore[arg-type]
    if method.is_block:
        q = q[:1].expand_as(q)  # the row of context 0, in which a first step begins
    if method.rule == "block":
        if int((q > 0).sum(-1).max()) ** method.depth > ENUMERABLE:
            return None
        return 1 + block_accepted(p, q, table.after, method.depth)

    @cache
    def accepted(context: int, level: int) -> float:
        if level == method.depth:
            return 0.0
        a = accepted_ids(method, p[context], q[context], table.draft[context], method.widths[level])
        contexts, place = table.after[context].unique(return_inverse=True)
        mass = torch.zeros(len(contexts), dtype=torch.float64).index_add(0, place, a)
        pairs = zip(contexts.tolist(), mass.tolist(), strict=True)
        return math.fsum(share * (1 + accepted(after, level + 1)) for after, share in pairs if share > 0)

    return 1 + accepted(0, 0)


def block_accepted(p: Tensor, q: Tensor, after: Tensor, depth: int) -> float:
    """E[A] of rule ``block`` by enumeration: sum_i E[w_i], w_0 = 1, w_i = min(1, w_{i-1} p_i / q_i) (Sun et al.).

    Rows p and q ``[contexts, vocab]``, where each id leads as in a `Table`; drafts begin in context 0.
    """
    rows_p, rows_q, following = p.tolist(), q.tolist(), after.tolist()

    @cache
    def below(context: int, left: int, weight: float) -> float:
        total = 0.0
        for px, qx, behind in zip(rows_p[context], rows_q[context], following[context], strict=True):
            if qx > 0:
                w = min(1.0, weight * px / qx)
                total += qx * (w + (below(behind, left - 1, w) if left > 1 else 0.0))
        return total

    return below(0, depth, 1.0)


def accepted_ids(method: Procedure, p: Tensor, q: Tensor, row: Tensor, count: int) -> Tensor:
    """a_x: probability that a child with id x is drafted and accepted at a node of p and q. ``[vocab]``."""
    best = row.argsort(descending=True, stable=True)
    if method.siblings == "top":
        return p * torch.zeros_like(p).index_fill(0, best[:count], 1.0)
    if method.siblings == "mixed":
        rest = q.index_fill(0, best[: count - 1], 0.0)
        rest = rest / rest.sum() if float(rest.sum()) > 0 else rest
        return torch.where(rest > 0, torch.minimum(p, rest), p * (q.index_fill(0, best[count - 1 :], 0.0) > 0))
    if method.rule == "match":
        both = (p > 0) & (q > 0)
        a, b = p[both], q[both]
        return torch.zeros_like(p).masked_scatter(both, 1 / torch.maximum(p / a[:, None], q / b[:, None]).sum(-1))
    return recursive_ids(p, q, count, replacement=method.siblings == "independent")


def recursive_ids(p: Tensor, q: Tensor, count: int, *, replacement: bool) -> Tensor:
    """The same for recursive rejection of `count` candidates; of one it is min(p, q)."""
    taken = torch.minimum(p, q)
    rest = (p - q).clamp(min=0)
    mass = float(rest.sum())
    if count == 1 or mass <= 0:
        return taken
    if replacement:  # what is left does not depend on which candidate was rejected
        return taken + mass * recursive_ids(rest / mass, q, count - 1, replacement=True)
    refused = (q - p).clamp(min=0)
    for x in refused.nonzero().flatten().tolist():
        others = q.clone()
        others[x] = 0
        left = float(others.sum())
        if left > 0:
            later = recursive_ids(rest / mass, others / left, count - 1, replacement=False)
            taken = taken + float(refused[x]) * later
    return taken
