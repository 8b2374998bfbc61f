# ruff: noqa: SIM108 - a ternary would make both
"""Probabilities: p(l) = exp((l - maximum) / T - shift) * scale where l >= threshold; a record's law has no shift."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chains import column_of
from .records import R_MAX, R_SCALE, R_THRESHOLD, get_record_f
from .rows import LOG2E, logits_at, unit_of

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32


class Law(NamedTuple):
    """Of one row, or of several."""

    maximum: Any
    scale: Any
    threshold: Any


@triton.jit
def law_of(ws, row):
    """What the record of row(s) says."""
    ok = row >= 0
    return Law(
        get_record_f(ws, row, R_MAX, ok),
        get_record_f(ws, row, R_SCALE, ok),
        get_record_f(ws, row, R_THRESHOLD, ok),
    )


@triton.jit
def kept(x, threshold):
    return (x >= threshold) & (x > float("-inf"))


@triton.jit
def prob(x, law, inv_t, shift=None):
    """Probability of logits x under a law; a record's has no shift."""
    if shift is None:
        z = (x - law.maximum) * unit_of(inv_t)
    else:
        z = ((x - law.maximum) * inv_t - shift) * LOG2E
    return tl.where(kept(x, law.threshold), tl.exp2(z) * law.scale, 0.0)


# The exponent stands in both: behind a call of its own the second tile of a pair is loaded later on sm_100, in 128
# registers, not 96 (acceptance_ratios 153 us, not 114, by the model).
@triton.jit
def probs(x, law, inv_t, shift=None):
    """`prob` of a tile of one row, whose threshold is raised above -inf once: each logit is compared once."""
    least = tl.where(law.threshold == float("-inf"), LOWEST, law.threshold)
    if shift is None:
        z = (x - law.maximum) * unit_of(inv_t)
    else:
        z = ((x - law.maximum) * inv_t - shift) * LOG2E
    return tl.where(x >= least, tl.exp2(z) * law.scale, 0.0)


@triton.jit
def draft_logits_at(draft, columns, offset, number, v, mask):
    """Draft logits of target ids v of any shape: -inf where no column maps to the id, or mask is off."""
    c = column_of(columns, offset, v, mask, draft.vocab)
    return logits_at(draft, offset, number, c, c >= 0)
