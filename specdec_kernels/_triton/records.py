"""The record of a row: its law, and what rules ask of it."""

import triton
import triton.language as tl

# Record of a row, float32: p(l) = exp((l - max) / T) * scale for l >= threshold; entropy; raw logsumexp; mass.
R_MAX, R_SCALE, R_THRESHOLD, R_ENTROPY, R_RAW, R_MASS, R_FIELDS = (tl.constexpr(i) for i in range(7))
# ... and int32: argmax, winner, rank, state.
Q_ARG, Q_WINNER, Q_RANK, Q_STATE, Q_FIELDS = (tl.constexpr(i) for i in range(5))
# State of a row: law known, unusable, or its threshold still open.
GOOD, BAD, OPEN = (tl.constexpr(i) for i in range(3))


@triton.jit
def weights(x, maximum, inv_t):
    """exp((x - maximum) / T), 0 for -inf; the maximum is finite or stands for an empty tile."""
    z = (x - maximum) * inv_t
    return tl.where(x > float("-inf"), tl.exp(z), 0.0)


@triton.jit
def put_law(digest, row, maximum, mass, threshold, zsum, greedy, bad, on=None):
    """Write the laws of rows into their records, where `on` is set; of a greedy row a point mass at the argmax."""
    mass = tl.where(greedy, 1.0, mass)
    at = digest.record_f + row * R_FIELDS
    tl.store(at + R_MAX, maximum, mask=on)
    tl.store(at + R_SCALE, tl.div_rn(tl.full([], 1.0, tl.float32), mass), mask=on)
    tl.store(at + R_THRESHOLD, tl.where(greedy, maximum, threshold), mask=on)
    tl.store(at + R_ENTROPY, tl.where(greedy, 0.0, tl.log(mass) - tl.div_rn(zsum, mass)), mask=on)
    tl.store(at + R_MASS, mass, mask=on)
    tl.store(digest.record_i + row * Q_FIELDS + Q_STATE, tl.where(bad, BAD, GOOD), mask=on)


@triton.jit
def get_record_f(digest, row, field: tl.constexpr, mask):
    """A field of the records of rows (a tensor or a scalar)."""
    return tl.load(digest.record_f + row * R_FIELDS + field, mask=mask, other=0.0)


@triton.jit
def get_record_i(digest, row, field: tl.constexpr, mask):
    return tl.load(digest.record_i + row * Q_FIELDS + field, mask=mask, other=0)
