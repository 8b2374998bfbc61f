"""Rows of logits and how a request samples from them: what kernels are handed, and how a tile is loaded."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Changes(NamedTuple):
    """`RowEdits`; rows are numbered as `number_of` does."""

    bits: Any  # int64 [rows, ceil(vocab / 64)]
    start: Any  # int32 [rows, ceil(vocab / 64) + 1]
    numbers: Any  # float32 [4, rows, room]: bias, repetition, minus, id
    room: Any  # a `launch.size`
    plane: Any  # rows * room, likewise


class Rows(NamedTuple):
    """Logit rows of all requests: row i of request b starts at b * request + i * row.

    A kernel of planned rows gets the width apart: `Rows(vocab, *rows[1:])`.
    """

    vocab: Any
    ptr: Any
    request: Any  # stride between requests, a `launch.size`; 0 in a flat layout
    row: Any  # stride between rows
    allowed: Any  # int32 bits [rows, ceil(vocab / 32)] or None
    allowed_row: Any  # stride between its rows, a `launch.size`
    changes: Any = None  # `Changes`
    aligned: Any = None  # not None: every row begins at a multiple of 16 bytes


class Noise(NamedTuple):
    """Names of the random numbers, int64 [batch]; step and lane may be null pointers."""

    seed: Any
    position: Any
    step: Any
    lane: Any


# Edits of a tile that are made at once.
LOG_EDITS = tl.constexpr(7)
EDITS = tl.constexpr(1 << 7)
# exp2 takes 3 instructions less than exp, and is 0 below 2^-126.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def unit_of(inv_t):
    """What exp2 takes for exp; finite, as 0 times an infinite one would be NaN."""
    return tl.minimum(inv_t * LOG2E, 3e38)


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


class Settings(NamedTuple):
    """How a request samples: `Sampling` as kernels use it."""

    inv_t: Any  # 1, as t is, if it is greedy
    t: Any
    k: Any  # top-k, 0 if it is off
    p: Any  # top-p, 1 if it is off
    floor: Any  # min-p, 0 if it is off
    filtered: Any
    greedy: Any
    bad: Any


@triton.jit
def sampling_of(s, b, vocab):
    """`Settings` of request b."""
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
    return Settings(inv_t, t, k, p, floor, fact(filtered), fact(greedy), fact(bad))


@triton.jit
def load_logits(rows, offset, start, TILE: tl.constexpr):
    """float32 logits start .. start + TILE - 1 of the row at `offset`; -inf past the end."""
    v = start + tl.arange(0, TILE)
    row = rows.ptr + offset
    if rows.aligned is not None:
        row = tl.multiple_of(row, 16)
    if start + TILE <= rows.vocab:  # noqa: SIM108 - a mask would split the load
        x = tl.load(row + v)
    else:
        x = tl.load(row + v, mask=v < rows.vocab, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def low_word(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def high_word(x):
    return ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _ones(word):
    """How many bits of words of 32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def ones(word):
    """How many bits of words of 64 are set."""
    return _ones(low_word(word)) + _ones(high_word(word))


@triton.jit
def bit_of(v):
    """The bit of an id in its word, as uint64."""
    lane = (v & 63).to(tl.uint64)
    return (tl.zeros_like(lane) + 1) << lane


@triton.jit
def words_of(changes, number, vocab, block, mask):
    """(bits of blocks of 64 ids, edits of the row before each); 0 where mask is off."""
    blocks = (vocab + 63) // 64
    bits = tl.load(changes.bits + number * blocks + block, mask=mask, other=0).to(tl.uint64, bitcast=True)
    return bits, tl.load(changes.start + number * (blocks + 1) + block, mask=mask, other=0)


@triton.jit
def change_of(changes, number, vocab, v, mask):
    """(whether ids v of row `number` have an edit, which one of all rows'); number and v broadcast."""
    bytes = changes.bits.to(tl.pointer_type(tl.uint8)) + number * ((vocab + 63) // 64 * 8)
    on = mask & (((tl.load(bytes + v // 8, mask=mask, other=0) >> (v & 7).to(tl.uint8)) & 1) == 1)
    bits, before = words_of(changes, number, vocab, v // 64, on)
    return on, number * size_of(changes.room) + before + ones(bits & (bit_of(v) - 1))


@triton.jit
def _changed(x, changes, at, on):
    """What edits `at` make of logits; bans hold whatever the logit is."""
    numbers, plane = changes.numbers + at, size_of(changes.plane)
    bias, minus = tl.load(numbers, mask=on, other=0.0), tl.load(numbers + 2 * plane, mask=on, other=0.0)
    repetition = tl.load(numbers + plane, mask=on, other=1.0)
    x += bias
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition) - minus
    return tl.where(bias == float("-inf"), bias, x)


@triton.jit
def changes_of(rows, number, start, TILE: tl.constexpr):
    """(first edit, end) of a tile of row `number`, in the order of the row's ids."""
    blocks = (rows.vocab + 63) // 64
    first = tl.minimum(start // 64, blocks)
    at = rows.changes.start + number * (blocks + 1)
    return tl.load(at + first), tl.load(at + tl.minimum(first + TILE // 64, blocks))


@triton.jit
def _change_blocks(x, rows, number, block, chosen):
    """Logits of blocks [n, 64] with the edits of their row."""
    bits, before = words_of(rows.changes, number, rows.vocab, block, chosen & (block * 64 < rows.vocab))
    bit = bit_of(tl.arange(0, 64))[None, :]
    on, place = (bits[:, None] & bit) != 0, before[:, None] + ones(bits[:, None] & (bit - 1))
    return tl.where(on, _changed(x, rows.changes, number * size_of(rows.changes.room) + place, on), x)


@triton.jit
def _bytes(row, vocab, start, TILE: tl.constexpr):
    """A tile of a row of packed bits, eight ids each: as many as a thread loads logits of at once."""
    at = start // 8 + tl.arange(0, TILE // 8)
    return tl.load(row.to(tl.pointer_type(tl.uint8)) + at, mask=at * 8 < vocab, other=0)


@triton.jit
def _edit_bytes(rows, number, start, TILE: tl.constexpr):
    """Packed bits of what has an edit."""
    return _bytes(rows.changes.bits + number * ((rows.vocab + 63) // 64), rows.vocab, start, TILE)


@triton.jit
def _allowed8(rows, number, start, TILE: tl.constexpr):
    """Packed bits of what is allowed."""
    return _bytes(rows.allowed + number * size_of(rows.allowed_row), rows.vocab, start, TILE)


@triton.jit
def _where_bits(packed, x, TILE: tl.constexpr):
    """A tile where its bits are 1, else -inf."""
    on = packed.to(tl.int32)[:, None] & (1 << tl.arange(0, 8))[None, :]
    return tl.where(tl.reshape(on, (TILE,)) != 0, x, float("-inf"))


@triton.jit
def _edited(x, rows, offset, number, start, first, end, TILE: tl.constexpr):
    """A tile with its edits `first` .. `end - 1`, which are made apart: a lane takes that of its rank among them."""
    byte = start // 8 + tl.arange(0, TILE // 8)
    word, before = words_of(rows.changes, number, rows.vocab, byte // 8, byte * 8 < rows.vocab)
    before += ones(word & (bit_of(byte * 8) - 1)) - first - 1
    shift = (byte % 8 * 8).to(tl.uint64)
    bits = ((word >> shift) & 0xFF).to(tl.uint32)
    bits = (bits | (bits << 12)) & 0x000F000F
    bits = (bits | (bits << 6)) & 0x03030303
    bits = (bits | (bits << 3)) & 0x11111111  # each at the foot of a half-byte
    counts = bits * 0x11111111  # ... which counts those up to it
    lane = (4 * tl.arange(0, 8)[None, :]).to(tl.uint32)
    rank = before[:, None] + ((counts[:, None] >> lane) & 15).to(tl.int32)
    rank = tl.reshape(tl.where((bits[:, None] >> lane) & 1 == 1, rank, -1), (TILE,))
    for edit in range(first, end, EDITS):
        edits = edit + tl.arange(0, EDITS)
        _v, asked = logits_of_edits(rows, offset, number, edits, edits < end)
        is_here = (rank >> LOG_EDITS) == ((edit - first) >> LOG_EDITS)
        x = tl.where(is_here, tl.gather(asked, rank & (EDITS - 1), 0), x)
    return x


@triton.jit
def load_asked(rows, offset, number, start, TILE: tl.constexpr):
    """A tile of row `number`, at `offset`, with its edits, and -inf where the packed bit of the id is 0."""
    x = load_logits(rows, offset, start, TILE)
    if rows.changes is not None:
        first, end = changes_of(rows, number, start, TILE)
        if first < end:
            x = _edited(x, rows, offset, number, start, first, end, TILE)
    if rows.allowed is not None:
        x = _where_bits(_allowed8(rows, number, start, TILE), x, TILE)
    return x


@triton.jit
def unlisted(x, rows, number, start, TILE: tl.constexpr):
    """A tile of row `number` as it is, with -inf for the ids that have an edit or are not allowed."""
    if rows.changes is not None:
        packed = 0xFF ^ _edit_bytes(rows, number, start, TILE)
        if rows.allowed is not None:
            packed = packed & _allowed8(rows, number, start, TILE)
        x = _where_bits(packed, x, TILE)
    elif rows.allowed is not None:
        x = _where_bits(_allowed8(rows, number, start, TILE), x, TILE)
    return x


@triton.jit
def logits_of_edits(rows, offset, number, edit, on):
    """(ids of edits of row `number`, their logits as asked); -inf where `on` is off or they are not allowed."""
    at = number * size_of(rows.changes.room) + edit
    v = tl.load(rows.changes.numbers + 3 * size_of(rows.changes.plane) + at, mask=on, other=0.0).to(tl.int32)
    x = tl.load(rows.ptr + offset + v, mask=on, other=float("-inf")).to(tl.float32)
    x = tl.where(on, _changed(x, rows.changes, at, on), float("-inf"))
    if rows.allowed is not None:
        x = _where_allowed(x, rows, number, v, on)
    return v, x


@triton.jit
def logits_at(rows, offset, number, v, mask):
    """float32 logits of ids v of any shape as asked (offset and number broadcast); -inf where mask is off."""
    x = tl.load(rows.ptr + offset + v, mask=mask, other=float("-inf")).to(tl.float32)
    if rows.changes is not None:
        on, at = change_of(rows.changes, number, rows.vocab, v, mask)
        x = tl.where(on, _changed(x, rows.changes, at, on), x)
    if rows.allowed is not None:
        x = _where_allowed(x, rows, number, v, mask)
    return x


@triton.jit
def ids_of_blocks(block, chosen, vocab):
    """(ids, whether they are there) of blocks, [n, 64]."""
    v = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    return v, chosen[:, None] & (v < vocab)


@triton.jit
def logits_of_blocks(rows, offset, number, block, chosen):
    """(ids, whether they are there, logits as asked) of blocks of a row, [n, 64]; -inf where there is none."""
    v, there = ids_of_blocks(block, chosen, rows.vocab)
    x = tl.load(rows.ptr + offset + v, mask=there, other=float("-inf")).to(tl.float32)
    if rows.changes is not None:
        x = _change_blocks(x, rows, number, block, chosen)
    if rows.allowed is not None:
        x = _where_allowed(x, rows, number, v, there)
    return v, there, x


@triton.jit
def _where_allowed(x, rows, number, v, mask):
    """Logits of ids v, -inf where the packed bit is 0."""
    word = tl.load(rows.allowed + number * size_of(rows.allowed_row) + v // 32, mask=mask, other=0)
    return tl.where(((word >> (v % 32).to(tl.int32)) & 1) == 1, x, float("-inf"))


@triton.jit
def key_of(x):
    """int32 that orders as the float does; -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Inverse of `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
