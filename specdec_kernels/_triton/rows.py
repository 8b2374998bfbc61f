"""Rows of logits and how a request samples from them: what kernels are handed, and how a tile is loaded."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """Logit rows of all requests: row i of request b starts at b * request + i * row."""

    ptr: Any
    request: Any  # stride between requests, a `launch.size`; 0 in a flat layout
    row: Any  # stride between rows
    vocab: Any
    allowed: Any  # int32 bits [rows, ceil(vocab / 32)] or None
    allowed_row: Any
    aligned: Any = None  # not None: every row begins at a multiple of 16 bytes


class Noise(NamedTuple):
    """Names of the random numbers, int64 [batch]; step and lane may be null pointers."""

    seed: Any
    position: Any
    step: Any
    lane: Any


@triton.jit
def of_width(rows, vocab):
    """Planned rows: their places stand in the plan, their width is passed apart."""
    return Rows(rows.ptr, 0, 0, vocab, rows.allowed, 0)


@triton.jit
def fact(condition):
    """A scalar condition on floats that may meet blocks: the interpreter would splat it with the floats' type."""
    return tl.where(condition, 1, 0) != 0


@triton.jit
def size_of(n):
    """A size that came in a tuple: `launch.size`."""
    return n >> 4


@triton.jit
def entry_or(ptr, b, otherwise):
    """Entry b of an optional tensor: one that is not given is a null pointer, so that no kernel is compiled for it."""
    return tl.load(ptr + b, mask=ptr.to(tl.int64) != 0, other=otherwise)


@triton.jit
def is_active(s, b):
    """Whether request b takes part."""
    return entry_or(s.active, b, 1) != 0


@triton.jit
def sampling_of(s, b, vocab):
    """(inv_t, T, top_k, top_p, min_p, filtered, greedy, bad) of request b; 0, 1, 0 are what is off."""
    t, k = entry_or(s.temperature, b, 1.0), entry_or(s.top_k, b, 0)
    p, floor = entry_or(s.top_p, b, 1.0), entry_or(s.min_p, b, 0.0)
    bad = is_active(s, b) & ((t != t) | (t < 0) | (k < 0) | (p != p) | (floor != floor))
    inv_t = tl.div_rn(tl.full([], 1.0, tl.float32), t)
    greedy = bad | (t == 0) | (tl.abs(inv_t) == float("inf"))
    t = tl.where(greedy, 1.0, t)
    inv_t = tl.where(greedy, 1.0, inv_t)
    k = tl.where(greedy | (k >= vocab), 0, k)
    p = tl.where(greedy | (p >= 1), 1.0, p)
    floor = tl.where(greedy | (floor <= 0), 0.0, floor)
    filtered = (k > 0) | (p < 1) | (floor > 0)
    return inv_t, t, k, p, floor, fact(filtered), fact(greedy), fact(bad)


@triton.jit
def load_logits(rows, offset, start, TILE: tl.constexpr):
    """float32 logits start .. start + TILE - 1 of the row at `offset`; -inf past the end."""
    v = start + tl.arange(0, TILE)
    row = rows.ptr + offset
    if rows.aligned is not None:
        row = tl.multiple_of(row, 16)
    return tl.load(row + v, mask=v < rows.vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def mask_allowed(x, rows, bits, start, TILE: tl.constexpr):
    """-inf where the packed bit of the id is 0; `bits` is the place of the row's first mask word."""
    if rows.allowed is not None:
        word = start // 32 + tl.arange(0, TILE // 32)
        packed = tl.load(rows.allowed + bits + word, mask=word * 32 < rows.vocab, other=0)
        on = (packed[:, None] >> tl.arange(0, 32)[None, :]) & 1
        x = tl.where(tl.reshape(on, (TILE,)) == 1, x, float("-inf"))
    return x


@triton.jit
def logits_at(rows, offset, bits, v, mask):
    """Masked float32 logits of ids v of any shape (offset and bits broadcast); -inf where mask is off.

    `bits` is the place of the row's first mask word.
    """
    x = tl.load(rows.ptr + offset + v, mask=mask, other=float("-inf")).to(tl.float32)
    if rows.allowed is not None:
        word = tl.load(rows.allowed + bits + v // 32, mask=mask, other=0)
        x = tl.where(((word >> (v % 32).to(tl.int32)) & 1) == 1, x, float("-inf"))
    return x


@triton.jit
def key_of(x):
    """int32 that orders as the float does; -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Inverse of `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
