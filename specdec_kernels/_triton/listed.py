# ruff: noqa: SIM102 - `if` on a constexpr prunes code
"""Ids that have an edit, in the digests of rows, whose stream leaves them out.

They are few, and have a launch of one warp a tile: in the stream each lane would look for the edits of each of its
values, or each of its warps would do what one can.
"""

import triton
import triton.language as tl

from .digest import T_ENTROPY, T_MAX, T_SUM, Digest, finite_or_zero, larger, largest
from .launch import entry
from .noise import BLOCK
from .plan import row_of
from .rows import LOG2E, Rows, changes_of, fact, logits_of_edits, unit_of

EDITS = tl.constexpr(32)  # of a tile, at once


@triton.jit
def _relative(top, mass, zsum, maximum, inv_t):
    """Sums relative to `top`, relative to a maximum that is not less."""
    delta = tl.where(fact(top > float("-inf")), (top - maximum) * inv_t, 0.0)
    factor = tl.exp2(delta * LOG2E)
    return mass * factor, tl.where(fact(factor > 0), factor * (zsum + delta * mass), 0.0)


@triton.jit
def _take_tile(
    digest, rows, blocks, at, tile, offset, number, inv_t, MASS: tl.constexpr, ENTROPY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Add the listed ids of a tile, number `at` of all, to its maximum, its sums and the maxima of its blocks."""
    first, end = changes_of(rows, number, tile * TILE, TILE)
    if first < end:
        fields, plane = digest.tile + at, digest.rows * digest.tiles
        top = tl.load(fields + T_MAX * plane)
        mass, zsum = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
        if MASS:
            mass = tl.load(fields + T_SUM * plane)
            if ENTROPY:
                zsum = tl.load(fields + T_ENTROPY * plane)
        for edit in range(first, end, EDITS):
            edits = edit + tl.arange(0, EDITS)
            v, x = logits_of_edits(rows, offset, number, edits, edits < end)
            # NaN makes the tile's maximum NaN, and the row unusable. The sign of -0 would mislead the maximum.
            of_block = blocks + at * (TILE // BLOCK) + (v - tile * TILE) // BLOCK
            tl.atomic_max(of_block, x + 0.0, mask=x > float("-inf"), sem="relaxed")
            maximum = larger(top, largest(x, 0))
            if MASS:
                safe = finite_or_zero(maximum)
                mass, zsum = _relative(top, mass, zsum, safe, inv_t)
                z = x - safe
                w = tl.exp2(z * unit_of(inv_t))
                mass += tl.sum(w, axis=0)
                if ENTROPY:
                    zsum += tl.sum(w * tl.where(w > 0, z * inv_t, 0.0), axis=0)
            top = maximum
        tl.store(fields + T_MAX * plane, top)
        if MASS:
            tl.store(fields + T_SUM * plane, mass)
            if ENTROPY:
                tl.store(fields + T_ENTROPY * plane, zsum)


@entry
def listed_kernel(
    digest, plan, target, draft, count, tiles, vocab, draft_vocab,
    MASS: tl.constexpr, ENTROPY: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The listed ids of the planned rows. Grid: rows * tiles."""
    digest, target = Digest(count, tiles, *digest[2:]), Rows(vocab, *target[1:])
    pid = tl.program_id(0)
    tile, row = pid % tiles, row_of(plan, (pid // tiles).to(tl.int64))
    pid, offset, number, inv_t = pid.to(tl.int64), row.offset, row.number, row.inv_t
    if target.changes is not None:
        if (offset >= 0) & (number >= 0):
            _take_tile(digest, target, digest.blocks, pid, tile, offset, number, inv_t, MASS, ENTROPY, TILE)
    if DRAFT:
        rows = Rows(draft_vocab, *draft[1:])
        if rows.changes is not None:
            if (offset >= 0) & (number < 0):
                _take_tile(digest, rows, digest.draft_blocks, pid, tile, offset, -1 - number, inv_t, True, False, TILE)
