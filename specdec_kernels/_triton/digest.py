"""The digest of a row: what a call keeps of the logits it streams, once, by a kernel that knows no rule.

Of each tile: its maximum and its sums relative to it. Of each block of 64 ids: its largest logit. Maxima keep NaN.
A sum depends on its tile alone: not on the batch, the slot or the launch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launch import entry
from .noise import BLOCK
from .plan import row_of
from .rows import LOG2E, Rows, load_logits, unit_of, unlisted

# Of a tile, float32: maximum, sum exp z with z = (logit - maximum) / T, sum z exp z; and without mask at T = 1 the
# maximum and sum exp z.
T_MAX, T_SUM, T_ENTROPY, T_RAW_MAX, T_RAW_SUM, T_FIELDS = (tl.constexpr(i) for i in range(6))


class Digest(NamedTuple):
    """Digests of all rows, and what `settle` makes of each.

    A kernel that is not specialised on the sizes gets them apart: `Digest(rows, tiles, *digest[2:])`.
    """

    rows: Any
    tiles: Any
    tile: Any  # float32 [T_FIELDS, rows, tiles]
    blocks: Any  # largest logit of each block of a target row, [rows, tiles * blocks of a tile], in their dtype
    draft_blocks: Any  # ... of a draft row
    record_f: Any  # float32 [rows, R_FIELDS]
    record_i: Any  # int32 [rows, Q_FIELDS]


@triton.jit
def larger(a, b):
    """The larger one; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Maximum along an axis; NaN if there is one."""
    return tl.reduce(x, AXIS, larger)


@triton.jit
def finite_or_zero(maximum):
    """What to subtract from the logits of a tile: 0 where all are -inf, or one is NaN."""
    return tl.where(maximum > float("-inf"), maximum, 0.0)


@triton.jit
def _stream(
    digest, rows, blocks, at, tile, offset, number, inv_t,
    MASS: tl.constexpr, ENTROPY: tl.constexpr, RAW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Digest of the tile of a program, number `at` of all; those behind a shorter row have none.

    Ids that have an edit are left out: see listed.py.
    """
    BLOCKS: tl.constexpr = TILE // BLOCK
    planes = digest.rows * digest.tiles
    start = tile * TILE
    if (tile == 0) | (start < rows.vocab):
        raw = load_logits(rows, offset, start, TILE)
        x = unlisted(raw, rows, number, start, TILE)
        of_block = largest(tl.reshape(x, (BLOCKS, BLOCK)), 1)
        tl.store(blocks + at * BLOCKS + tl.arange(0, BLOCKS), of_block.to(blocks.dtype.element_ty))
        maximum = largest(of_block, 0)
        tile_f = digest.tile + at
        tl.store(tile_f + T_MAX * planes, maximum)
        if MASS:
            z = x - finite_or_zero(maximum)
            w = tl.exp2(z * unit_of(inv_t))
            tl.store(tile_f + T_SUM * planes, tl.sum(w, axis=0))
            if ENTROPY:
                z = tl.where(w > 0, z * inv_t, 0.0)  # it may overflow where the weight is 0
                tl.store(tile_f + T_ENTROPY * planes, tl.sum(w * z, axis=0))
        if RAW:
            top = largest(raw, 0)
            tl.store(tile_f + T_RAW_MAX * planes, top)
            tl.store(tile_f + T_RAW_SUM * planes, tl.sum(tl.exp2((raw - finite_or_zero(top)) * LOG2E), axis=0))


@entry
def digest_kernel(
    digest, plan, target, draft, count, tiles, vocab, draft_vocab, parts,
    MASS: tl.constexpr, ENTROPY: tl.constexpr, RAW: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Digests of the planned rows. Grid: rows * parts; a program streams some tiles of a row, one after the other."""
    digest, target = Digest(count, tiles, *digest[2:]), Rows(vocab, *target[1:])
    pid = tl.program_id(0)
    row, part = pid // parts, pid % parts
    planned = row_of(plan, row.to(tl.int64))
    offset, number, inv_t = planned.offset, planned.number, planned.inv_t
    at, each = row.to(tl.int64) * tiles, (tiles + parts - 1) // parts
    first, end = part * each, tl.minimum(part * each + each, tiles)
    # Both are asked, so that the second is on its way before the first has come.
    if (offset >= 0) & (number > -(1 << 62)):
        if number >= 0:
            for tile in range(first, end):
                _stream(digest, target, digest.blocks, at + tile, tile, offset, number, inv_t, MASS, ENTROPY, RAW, TILE)
        else:
            if DRAFT:
                rows = Rows(draft_vocab, *draft[1:])
                blocks, number = digest.draft_blocks, -1 - number
                for tile in range(first, end):
                    _stream(digest, rows, blocks, at + tile, tile, offset, number, inv_t, True, False, False, TILE)
