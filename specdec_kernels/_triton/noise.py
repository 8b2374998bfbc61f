"""Random words and race noise, the same bits as `specdec_kernels._random` (launch with enable_fp_fusion=False)."""

import triton
import triton.language as tl

from .codes import COIN_PURPOSE, TARGET_PURPOSE
from .rows import entry_or, high_word, low_word

BLOCK = tl.constexpr(64)  # ids of a block of the noise
MINIMA, PLACES = tl.constexpr(2**29), tl.constexpr(3 * 2**28)  # first counters of a block's minimum and its place


@triton.jit
def philox(key_low, key_high, c0, c1, c2, c3):
    """Philox4x32-10 on uint32 tensors."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ key_low, low1, high0 ^ c3 ^ key_high, low0
        key_low += 0x9E3779B9
        key_high += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _counters(noise, b, position, purpose: tl.constexpr, counter):
    """The four words of each Philox counter of request b."""
    seed = tl.load(noise.seed + b)
    step = tl.full([], 0, tl.int64)
    if purpose != TARGET_PURPOSE:  # plain decoding must not depend on the decode step
        step = entry_or(noise.step, b, 0)
    lane = entry_or(noise.lane, b, 0)
    zero = tl.zeros_like(counter).to(tl.uint32)
    tag = low_word(lane * 4 + purpose)
    return philox(
        low_word(seed) + zero,
        high_word(seed) + zero,
        counter.to(tl.uint32),
        low_word(position) + zero,
        low_word(step) + zero,
        tag + zero,
    )


@triton.jit
def words(noise, b, position, purpose: tl.constexpr, index, first: tl.constexpr = 0):
    """Words of arbitrary indices (int32 tensor) behind counter `first`."""
    w0, w1, w2, w3 = _counters(noise, b, position, purpose, (index >> 2) + first)
    which = index & 3
    return tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))


@triton.jit
def coins(noise, b, position, index):
    """Acceptance coins at positions (int64 tensor): those of index 0, or of the nodes of a depth by their rank."""
    return (words(noise, b, position, COIN_PURPOSE, index) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _log_core(f, e):
    """log(1 + f) + e log 2, every operation rounded in this order."""
    p = f * 0.06746640801429749 - 0.11675652116537094
    p = p * f + 0.11888162046670914
    p = p * f - 0.1240558922290802
    p = p * f + 0.14219552278518677
    p = p * f - 0.1666799634695053
    p = p * f + 0.2000211924314499
    p = p * f - 0.25000008940696716
    p = p * f + 0.3333331346511841
    z = f * f
    r = f * z * p
    r = r + e * -2.12194440e-4
    r = r - z * 0.5
    r = r + f
    return r + e * 0.693359375


@triton.jit
def _split(x):
    """(e, m) with x = m 2^e, m in [sqrt(1/2), sqrt(2))."""
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    m = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    return (bits >> 23) - 127, m


@triton.jit
def log(x):
    """Natural logarithm of positive normal float32, the same bits in every backend."""
    e, m = _split(x)
    return _log_core(m - 1.0, e.to(tl.float32))


@triton.jit
def _exponential(word):
    """-log1p(-x), the Exp(1) number of a word."""
    x = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    e, m = _split(1.0 - x)
    # Where 1 - x lies next to 1 its rounding would eat x; there -x itself is the argument.
    f = tl.where(e == 0, -x, m - 1.0)
    return -_log_core(f, e.to(tl.float32))


@triton.jit
def _minima(noise, b, position, purpose: tl.constexpr, block):
    """(smallest number, its place) of blocks of the noise (int32 tensor)."""
    least = _exponential(words(noise, b, position, purpose, block, MINIMA)) * (1.0 / 64.0)
    return least, (words(noise, b, position, purpose, block, PLACES) & (BLOCK - 1)).to(tl.int32)


@triton.jit
def noise_of(noise, b, position, purpose: tl.constexpr, ids):
    """-log E, what a race adds to the log-weights, of arbitrary ids (int32 tensor)."""
    least, place = _minima(noise, b, position, purpose, ids // BLOCK)
    rest = least + _exponential(words(noise, b, position, purpose, ids))
    return -log(tl.where(ids % BLOCK == place, least, rest))


@triton.jit
def _log_below(x):
    """A little less than log(x), .014 at most, of positive normal float32; `tl.log` is three times as long."""
    bits = x.to(tl.int32, bitcast=True)
    u = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return 0.6931472 * (bits.to(tl.float32) * 1.1920928955078125e-07 - 127.0 + 0.278 * u * (1.0 - u))


@triton.jit
def luck_of(noise, b, position, purpose: tl.constexpr, quad):
    """At least -log of the smallest numbers of the blocks of quads [..., n] (int32), but for rounding: [..., 4 n].

    The exponential of a word, -log1p(-x), is more than the first terms of its series.
    """
    w0, w1, w2, w3 = _counters(noise, b, position, purpose, quad + MINIMA)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    x = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return 4.1588830 - _log_below(x * (1.0 + x * (0.5 + x * (0.3333 + x * 0.25))))


@triton.jit
def least_at(noise, b, position, purpose: tl.constexpr, ids):
    """The smallest number in the block of each id (int32 tensor)."""
    return _exponential(words(noise, b, position, purpose, ids // BLOCK, MINIMA)) * (1.0 / 64.0)


@triton.jit
def block_noise(noise, b, position, purpose: tl.constexpr, block):
    """-log E of the ids of blocks [n] (int32): [n, 64]."""
    least, place = _minima(noise, b, position, purpose, block)
    quads = block[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    w0, w1, w2, w3 = _counters(noise, b, position, purpose, quads)
    rest = _exponential(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
    is_least = tl.arange(0, BLOCK)[None, :] == place[:, None]
    return -log(tl.where(is_least, least[:, None], least[:, None] + rest))
