"""Draft rows that hold candidates alone: whether they are distributions, and what a residual weighs."""

import triton
import triton.language as tl

from .chains import column_of, number_of, row_offset
from .launch import entry
from .laws import law_of, prob
from .plan import row_of
from .records import BAD, Q_FIELDS, Q_STATE, R_MASS, R_MAX, get_record_f
from .rows import logits_at, sampling_of

CHUNK = tl.constexpr(64)  # candidates that are looked at together


@entry
def check_kernel(digest, plan, columns, logits, draft_sampling, k, vocab, NT, ND):
    """A planned draft row is bad where an id is out of range or stands twice, or the log-sum is another. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    offset = row_of(plan, row).offset
    if (row % (NT + ND) >= NT) & (offset >= 0):
        wrong = tl.full([], 0, tl.int32)
        for start in range(0, k, CHUNK):
            j = start + tl.arange(0, CHUNK)
            v = tl.load(columns.kept + offset + j, mask=j < k, other=-1)
            x = tl.load(logits + offset + j, mask=j < k, other=float("-inf")).to(tl.float32)
            there = (v != -1) | (x != float("-inf"))
            wrong = tl.maximum(wrong, tl.max((there & ((v < 0) | (v >= vocab))).to(tl.int32), axis=0))
            for i in range(0, k):
                twice = there & (i > j) & (tl.load(columns.kept + offset + i) == v)
                wrong = tl.maximum(wrong, tl.max(twice.to(tl.int32), axis=0))
        inv_t = sampling_of(draft_sampling, row // (NT + ND), k).inv_t
        given = tl.load(columns.logsumexp + offset // k)
        own = get_record_f(digest, row, R_MAX, row >= 0) * inv_t + tl.log(get_record_f(digest, row, R_MASS, row >= 0))
        fits = tl.abs(own - given) <= 0.0009765625 + 2.384185791015625e-07 * tl.abs(given)
        if (wrong > 0) | (fits == 0):
            tl.store(digest.record_i + row * Q_FIELDS + Q_STATE, BAD)


@triton.jit
def _target_prob(call, b, i, first, row, v, there, inv_t):
    """P of target ids in row i."""
    offset, number = row_offset(call.target, call.chain, first, b, i, 1), number_of(call.chain, first, b, i)
    return prob(logits_at(call.target, offset, number, tl.where(there, v, 0), there), law_of(call.ws, row), inv_t)


@triton.jit
def kept_masses(call, b, i, first, row, draft_row, inv_t, a, scale, listed, weights, count):
    """(sum of (a p - scale q)+, sum of q) of row i; `count` listed ids weigh what is listed and have no q.

    As p is normalised, a (1 - what p has of the candidates) lies elsewhere.
    """
    offset = row_offset(call.draft, call.chain, first, b, i, 0)
    draft_inv_t = sampling_of(call.draft_sampling, b, call.draft.vocab).inv_t
    here, mass, left = (tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32))
    for start in range(0, call.draft.vocab, CHUNK):
        j = start + tl.arange(0, CHUNK)
        v = tl.load(call.columns.kept + offset + j, mask=j < call.draft.vocab, other=-1)
        there = (v >= 0) & (v < call.target.vocab)
        y = tl.load(call.draft.ptr + offset + j, mask=there, other=float("-inf")).to(tl.float32)
        p = tl.where(there, _target_prob(call, b, i, first, row, v, there, inv_t), 0.0)
        q = prob(y, law_of(call.ws, draft_row), draft_inv_t)
        weight = tl.maximum(a * p - scale * q, 0.0)
        if listed is not None:
            for m in range(0, count):
                hit = there & (v == tl.load(listed + m))
                weight = tl.where(hit, tl.load(weights + m), weight)
                q = tl.where(hit, 0.0, q)
        here += tl.sum(p, axis=0)
        mass += tl.sum(weight, axis=0)
        left += tl.sum(q, axis=0)
    if listed is not None:
        for m in range(0, count):
            v = tl.load(listed + m)
            if column_of(call.columns, offset, v, v >= 0, call.draft.vocab) < 0:
                here += _target_prob(call, b, i, first, row, v, v >= 0, inv_t)
                mass += tl.load(weights + m)
    return mass + a * tl.maximum(1.0 - here, 0.0), left
