"""Probabilities: p(l) = exp((l - maximum) / T - shift) * scale where l >= threshold; a record's law has no shift."""

import triton
import triton.language as tl

from .chains import column_of
from .records import R_MAX, R_SCALE, R_THRESHOLD, get_record_f
from .rows import logits_at

LOG2E = tl.constexpr(1.4426950408889634)  # exp2 takes 3 instructions less than exp, and is 0 below 2^-126


@triton.jit
def law_of(ws, row):
    """(maximum, shift, scale, threshold) of row(s)."""
    ok = row >= 0
    return (
        get_record_f(ws, row, R_MAX, ok),
        0.0,
        get_record_f(ws, row, R_SCALE, ok),
        get_record_f(ws, row, R_THRESHOLD, ok),
    )


@triton.jit
def kept(x, threshold):
    return (x >= threshold) & (x > float("-inf"))


@triton.jit
def prob(x, law, inv_t):
    """Probability of logits x under a record's law."""
    z = (x - law[0]) * inv_t - law[1]
    return tl.where(kept(x, law[3]), tl.exp2(z * LOG2E) * law[2], 0.0)


@triton.jit
def draft_logits_at(draft, columns, offset, number, v, mask):
    """Draft logits of target ids v of any shape: -inf where no column maps to the id, or mask is off."""
    c = column_of(columns, offset, v, mask, draft.vocab)
    return logits_at(draft, offset, number, c, c >= 0)
