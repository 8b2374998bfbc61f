"""Which rows a call reads: a table that one small launch writes, so that what streams rows knows no layout and no rule.

A row of a call has a number: b * (NT + ND) + slot, slots below NT the target rows of request b, the others its draft
rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chains import chain_of, number_of, row_offset
from .launch import entry
from .rows import sampling_of

# What is known of a row, int64: its first element, -1 if it is not read; its number (`number_of`), that of a draft row
# as -1 - number; the position that its draw is named by; the drafted id.
P_OFFSET, P_NUMBER, P_POSITION, P_DRAFTED, P_FIELDS = (tl.constexpr(i) for i in range(5))


class Plan(NamedTuple):
    """The table of rows."""

    at: Any  # int64 [rows, P_FIELDS]
    inv_t: Any  # float32 [rows]


@triton.jit
def put_row(plan, row, offset, number, position, drafted, inv_t, mask):
    """Plan rows (vectors)."""
    at = plan.at + row * P_FIELDS
    tl.store(at + P_OFFSET, offset, mask=mask)
    tl.store(at + P_NUMBER, number, mask=mask)
    tl.store(at + P_POSITION, position, mask=mask)
    tl.store(at + P_DRAFTED, drafted, mask=mask)
    # 1 / T is 0 where T is infinite; the least number instead keeps -inf * (1 / T) what it is.
    tl.store(plan.inv_t + row, tl.maximum(inv_t, 1.401298464324817e-45), mask=mask)


@triton.jit
def planned(plan, row, field: tl.constexpr):
    return tl.load(plan.at + row * P_FIELDS + field)


@entry
def plan_kernel(
    plan, chain, target, draft, sampling, draft_sampling, noise, NT, ND, more_target, more_draft,
    SKIPS_GREEDY: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Rows of a chain of k drafted ids: k + more_target target rows and k + more_draft draft rows. Grid: batch.

    A greedy draft is read by nobody; with SKIPS_GREEDY a greedy target needs no draft rows either.
    """
    b = tl.program_id(0).to(tl.int64)
    drafted = chain_of(chain, b, target.vocab, KP)
    first = drafted.first
    settings = sampling_of(sampling, b, target.vocab)
    i = tl.arange(0, KP)
    position = tl.full([KP], 0, tl.int64) + i
    if noise is not None:
        position += tl.load(noise.position + b)
    row = b * (NT + ND) + i
    used = (i < drafted.k + more_target) & (drafted.lost == 0)
    offset = tl.where(used, row_offset(target, chain, first, b, i, 1), -1)
    number = number_of(chain, first, b, i)
    put_row(plan, row, offset, number, position, drafted.ids, settings.inv_t + i * 0.0, i < NT)
    of_draft = sampling_of(draft_sampling, b, draft.vocab)
    used = (i < drafted.k + more_draft) & (drafted.lost == 0) & (of_draft.greedy == 0)
    if SKIPS_GREEDY:
        used = used & (settings.greedy == 0)
    offset = tl.where(used, row_offset(draft, chain, first, b, i, 0), -1)
    put_row(plan, row + NT, offset, -1 - number, position, drafted.ids, of_draft.inv_t + i * 0.0, i < ND)
