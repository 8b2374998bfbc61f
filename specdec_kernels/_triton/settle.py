# ruff: noqa: SIM102 - `if` on a constexpr prunes code
"""The law of a row from its digest, one program a row: merge, argmax, filters; where a rule asks for it a draw.

Tiles are merged in index order, so a sum depends on the row alone.
"""

import functools

import triton
import triton.language as tl

from .chains import chain_of, number_of, row_offset
from .digest import T_ENTROPY, T_MAX, T_RAW_MAX, T_RAW_SUM, T_SUM, Digest, larger, largest
from .gather import close_row, open_row
from .launch import entry
from .laws import law_of
from .noise import BLOCK
from .plan import row_of
from .records import (
    GOOD,
    OPEN,
    Q_ARG,
    Q_FIELDS,
    Q_RANK,
    Q_STATE,
    Q_WINNER,
    R_FIELDS,
    R_RAW,
    get_record_i,
    put_law,
    weights,
)
from .rows import Rows, fact, logits_at, logits_of_blocks, sampling_of
from .thresholds import by_scanning, from_blocks
from .visit import SPAN, Rest, View, draw, next_blocks, span_blocks, span_maxima

TILES = tl.constexpr(64)  # tiles that are merged at once
NOBODY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def maxima_of(digest, blocks, row, TILE: tl.constexpr):
    """Where the maxima of a row's blocks stand."""
    return blocks + row * digest.tiles * (TILE // BLOCK)


@triton.jit
def _tiles(digest, field: tl.constexpr, row, start, tiles, other: tl.constexpr):
    t = start + tl.arange(0, TILES)
    at = (field * digest.rows + row) * digest.tiles + t
    return tl.load(digest.tile + at, mask=t < tiles, other=other)


@triton.jit
def _raw_logsumexp(digest, row, tiles):
    """Log-sum of the row without its mask at T = 1; NaN if it is unusable."""
    top, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for start in range(0, tiles, TILES):
        top = larger(top, largest(_tiles(digest, T_RAW_MAX, row, start, tiles, float("-inf")), 0))
    safe = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    for start in range(0, tiles, TILES):
        maxima = _tiles(digest, T_RAW_MAX, row, start, tiles, float("-inf"))
        total += tl.sum(weights(maxima, safe, 1.0) * _tiles(digest, T_RAW_SUM, row, start, tiles, 0.0), axis=0)
    return tl.where(tl.abs(top) < float("inf"), safe + tl.log(total), float("nan"))


@triton.jit
def _merge(digest, row, tiles, inv_t, MASS: tl.constexpr, ENTROPY: tl.constexpr):
    """(maximum, first tile that has it, mass, entropy sum, bad) of a row."""
    maximum = tl.full([], float("-inf"), tl.float32)
    for start in range(0, tiles, TILES):
        maximum = larger(maximum, largest(_tiles(digest, T_MAX, row, start, tiles, float("-inf")), 0))
    bad = fact((tl.abs(maximum) < float("inf")) == 0)
    maximum = tl.where(bad, 0.0, maximum)
    first = tl.full([], NOBODY, tl.int32)
    mass, zsum = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for start in range(0, tiles, TILES):
        maxima = _tiles(digest, T_MAX, row, start, tiles, float("-inf"))
        at = start + tl.arange(0, TILES)
        first = tl.minimum(first, tl.min(tl.where(maxima == maximum, at, NOBODY), axis=0))
        if MASS:
            sums = _tiles(digest, T_SUM, row, start, tiles, 0.0)
            w = weights(maxima, maximum, inv_t)
            mass += tl.sum(tl.where(w > 0, w * sums, 0.0), axis=0)
            if ENTROPY:
                parts = _tiles(digest, T_ENTROPY, row, start, tiles, 0.0)
                delta = tl.where(w > 0, (maxima - maximum) * inv_t, 0.0)
                zsum += tl.sum(tl.where(w > 0, w * (parts + delta * sums), 0.0), axis=0)
    if not MASS:
        mass += 1.0
    return maximum, tl.where(bad, 0, first), mass, zsum, bad


@triton.jit
def _first_of(view, maximum, tile, bad, TILE: tl.constexpr):
    """Lowest id of the row's maximum, in the first tile that has it."""
    BLOCKS: tl.constexpr = TILE // BLOCK
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    x = tl.load(view.blocks + block).to(tl.float32)
    block = tl.min(tl.where(x == maximum, block, NOBODY), axis=0)
    v = tl.where(bad, 0, block) * BLOCK + tl.arange(0, BLOCK)
    x = logits_at(view.rows, view.offset, view.number, v, v < view.rows.vocab)
    return tl.where(bad, 0, tl.min(tl.where(x == maximum, v, NOBODY), axis=0))


@triton.jit
def rank_of(view, drafted, most):
    """How many ids come before a drafted one, up to `most`: larger logits, or equal ones of lower ids."""
    known = (drafted >= 0) & (drafted < view.rows.vocab)
    logit = logits_at(view.rows, view.offset, view.number, tl.where(known, drafted, 0), known)
    before = tl.full([], 0, tl.int32)
    count = (view.rows.vocab + BLOCK - 1) // BLOCK
    for start in range(0, count, SPAN):
        maxima = span_maxima(view.blocks, start, count)
        ties = (maxima == logit) & (span_blocks(start) * BLOCK < drafted)
        maxima = tl.where((maxima > logit) | ties, maxima, float("-inf"))
        going = tl.where(known & (before < most), 1, 0)
        while going > 0:
            block, chosen, maxima = next_blocks(maxima, logit, start)
            v, there, x = logits_of_blocks(view.rows, view.offset, view.number, block, chosen)
            ahead = there & ((x > logit) | ((x == logit) & (v < drafted)))
            before += tl.sum(tl.sum(ahead.to(tl.int32), axis=1), axis=0)
            going = tl.where((tl.max(chosen.to(tl.int32), axis=0) > 0) & (before < most), 1, 0)
    return before


@triton.jit
def settle_row(
    digest, view, work, row, sampling, b,
    MASS: tl.constexpr, ENTROPY: tl.constexpr, RAW: tl.constexpr, FILTERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the record of a row; where its filters need another look at it the record stays open."""
    settings = sampling_of(sampling, b, view.rows.vocab)
    tiles = tl.maximum((view.rows.vocab + TILE - 1) // TILE, 1)
    maximum, tile, mass, zsum, bad = _merge(digest, row, tiles, settings.inv_t, MASS, ENTROPY)
    argmax = _first_of(view, maximum, tile, bad, TILE)
    if RAW:
        tl.store(digest.record_f + row * R_FIELDS + R_RAW, _raw_logsumexp(digest, row, tiles))
    tl.store(digest.record_i + row * Q_FIELDS + Q_ARG, argmax)
    tl.store(digest.record_i + row * Q_FIELDS + Q_WINNER, argmax)
    threshold = tl.full([], float("-inf"), tl.float32)
    found = tl.full([], 1, tl.int32)
    if FILTERS:
        if settings.filtered & (bad == 0):
            picked, listed = work.picked + row * SPAN, work.listed + row * work.capacity
            threshold, kept, zsum, found = from_blocks(view, picked, listed, (maximum, mass), settings)
            mass = tl.where(found > 0, kept, mass)
    put_law(digest, row, maximum, mass, threshold, zsum, settings.greedy, bad)
    if FILTERS:
        if found == 0:
            open_row(digest, view, work, row, (maximum, mass), settings)
    tl.debug_barrier()


@triton.jit
def _merge_rows(digest, TOP: tl.constexpr, SUM: tl.constexpr, at, plane, inside, inv_t):
    """(maxima of their tiles, maximum, mass, bad) of rows, whose tiles are `at`; a field below 0 is not there."""
    maxima = tl.load(digest.tile + TOP * plane + at, mask=inside, other=float("-inf"))
    maximum = largest(maxima, 1)
    bad = fact((tl.abs(maximum) < float("inf")) == 0)
    maximum = tl.where(bad, 0.0, maximum)
    mass = tl.full(maximum.shape, 1.0, tl.float32)
    if SUM >= 0:
        w = weights(maxima, maximum[:, None], inv_t)
        sums = tl.load(digest.tile + SUM * plane + at, mask=inside, other=0.0)
        mass = tl.sum(tl.where(w > 0, w * sums, 0.0), axis=1)
    return maxima, maximum, mass, bad


@triton.jit
def settle_request(
    call, b, NT, NR, count, tiles,
    SAMPLES: tl.constexpr, ROWS: tl.constexpr, MASS: tl.constexpr, RAW: tl.constexpr, TILE: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    """Write the records of the rows of a chain, all at once: they have no filters, and no more than TILES tiles.

    SAMPLES: whether the rule reads sampling parameters. ROWS: whether it reads draft rows.
    """
    BLOCKS: tl.constexpr = TILE // BLOCK
    RP: tl.constexpr = KP * 2 if ROWS else KP
    digest, slot, t = call.ws, tl.arange(0, RP), tl.arange(0, TILES)[None, :]
    drafted, is_target = chain_of(call.chain, b, call.target.vocab, RP), slot < NT
    inv_t, greedy, has_draft = tl.full([RP], 1.0, tl.float32), b < 0, slot < 0
    if SAMPLES:
        settings = sampling_of(call.sampling, b, call.target.vocab)
        of_draft = sampling_of(call.draft_sampling, b, call.draft.vocab)
        inv_t, greedy = tl.where(is_target, settings.inv_t, of_draft.inv_t), settings.greedy
        has_draft = (slot < NR) & (slot - NT < drafted.k) & (greedy == 0) & (of_draft.greedy == 0)
    read = tl.where(is_target, slot <= drafted.k, has_draft) & (drafted.lost == 0)
    row = b * NR + tl.where(read, slot, 0)
    at, plane = row[:, None] * tiles + t, count * tiles
    SUM: tl.constexpr = T_SUM if MASS else -1
    maxima, maximum, mass, bad = _merge_rows(digest, T_MAX, SUM, at, plane, t < tiles, inv_t[:, None])
    put_law(digest, row, maximum, mass, slot * 0.0 - float("inf"), slot * 0.0, greedy, bad, read)
    if RAW:
        _, top, total, unusable = _merge_rows(digest, T_RAW_MAX, T_RAW_SUM, at, plane, t < tiles, 1.0)
        raw = tl.where(unusable, float("nan"), top + tl.log(total))
        tl.store(digest.record_f + row * R_FIELDS + R_RAW, raw, mask=read)
    # The argmax lies in the first block that has the maximum, of the first tile that does.
    looks, top, each = read & is_target & (bad == 0), maximum[:, None], tl.arange(0, BLOCK)[None, :]
    tile = tl.where(looks, tl.min(tl.where(maxima == top, t, NOBODY), axis=1), 0)
    block = tile[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    x = tl.load(digest.blocks + row[:, None] * tiles * BLOCKS + block).to(tl.float32)
    block = tl.where(looks, tl.min(tl.where(x == top, block, NOBODY), axis=1), 0)
    v = block[:, None] * BLOCK + each
    offset = tl.where(looks, row_offset(call.target, call.chain, drafted.first, b, slot, 1), 0)
    number = tl.where(looks, number_of(call.chain, drafted.first, b, slot), 0)
    x = logits_at(call.target, offset[:, None], number[:, None], v, looks[:, None] & (v < call.target.vocab))
    argmax = tl.where(looks, tl.min(tl.where(x == top, v, NOBODY), axis=1), 0)
    tl.store(digest.record_i + row * Q_FIELDS + Q_ARG, argmax, mask=read)
    tl.debug_barrier()


@triton.jit
def settle_again(digest, view, work, row, sampling, b, TILE: tl.constexpr):
    """Write the record of an open row, from what was gathered."""
    settings = sampling_of(sampling, b, view.rows.vocab)
    threshold, mass, zsum, closed = close_row(digest, work, row, view.rows.vocab, settings, TILE)
    maximum = law_of(digest, row).maximum
    if closed == 0:
        threshold, mass, zsum = by_scanning(view, maximum, settings, work.listed)
    tl.debug_barrier()
    put_law(digest, row, maximum, mass, threshold, zsum, b < 0, b < 0)
    tl.debug_barrier()


@triton.jit
def _settle(
    digest, view, work, row, sampling, b,
    MASS: tl.constexpr, ENTROPY: tl.constexpr, RAW: tl.constexpr, FILTERS: tl.constexpr, AGAIN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Settle a row, for the first time or after `gather_kernel`; whether it is settled now and was not before."""
    if AGAIN:
        fresh = get_record_i(digest, row, Q_STATE, row >= 0) == OPEN
        if FILTERS:
            if fresh:
                settle_again(digest, view, work, row, sampling, b, TILE)
    else:
        settle_row(digest, view, work, row, sampling, b, MASS, ENTROPY, RAW, FILTERS, TILE)
        fresh = get_record_i(digest, row, Q_STATE, row >= 0) != OPEN
    return fresh


def _name(made) -> str:
    """Profiles tell both launches apart."""
    return "settle_again_kernel" if made.constants["AGAIN"] else "settle_kernel"


@functools.partial(entry, repr=_name)
def settle_kernel(
    digest, plan, work, draft_work, target, draft, sampling, draft_sampling, count, tiles, vocab, draft_vocab, NT, ND,
    noise, top_m,
    PURPOSE: tl.constexpr, RANKS: tl.constexpr, MASS: tl.constexpr, ENTROPY: tl.constexpr, RAW: tl.constexpr,
    FILTERS: tl.constexpr, DRAFT_FILTERS: tl.constexpr, DRAFT: tl.constexpr, AGAIN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Records of the planned rows; PURPOSE names the noise of the draw of each target row, -1 for none. Grid: rows.

    AGAIN: those of the rows that `gather_kernel` read once more.
    """
    digest, target = Digest(count, tiles, *digest[2:]), Rows(vocab, *target[1:])
    row = tl.program_id(0).to(tl.int64)
    b = row // (NT + ND)
    planned = row_of(plan, row)
    offset, number = planned.offset, planned.number
    is_target = row % (NT + ND) < NT
    if offset >= 0:
        if is_target:
            view = View(target, offset, number, maxima_of(digest, digest.blocks, row, TILE))
            fresh = _settle(digest, view, work, row, sampling, b, MASS, ENTROPY, RAW, FILTERS, AGAIN, TILE)
            if PURPOSE >= 0:
                settings = sampling_of(sampling, b, target.vocab)
                if fresh & (settings.greedy == 0) & (get_record_i(digest, row, Q_STATE, row >= 0) == GOOD):
                    law, position = law_of(digest, row), planned.position
                    _score, token = draw(view, law, settings.inv_t, noise, b, position, Rest(), None, 0, PURPOSE, True)
                    tl.store(digest.record_i + row * Q_FIELDS + Q_WINNER, token)
            if RANKS:
                rank = rank_of(view, planned.drafted, top_m)
                tl.store(digest.record_i + row * Q_FIELDS + Q_RANK, rank)
        else:
            if DRAFT:
                rows = Rows(draft_vocab, *draft[1:])
                other = View(rows, offset, -1 - number, maxima_of(digest, digest.draft_blocks, row, TILE))
                _settle(
                    digest, other, draft_work, row, draft_sampling, b, True, False, False, DRAFT_FILTERS, AGAIN, TILE
                )
