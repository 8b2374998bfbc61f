# ruff: noqa: RUF059, SIM102 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""Target and draft rows side by side: their laws in one launch, and (p, q) of a tile over target ids."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import launch as host
from .brackets import close_row, gather_tile, open_row, sample_tile
from .chains import bit_row, chain_of, row_offset
from .filters import by_scanning, from_lists, list_tile
from .handshake import arrive
from .laws import draft_tile, law_of, prob
from .rows import load_logits, mask_allowed, sampling_of
from .stats import (
    F_CUT,
    F_MAX,
    F_SUM,
    I_ARG,
    I_COUNT,
    OPEN,
    Q_ARG,
    Q_STATE,
    get_record_i,
    merge_row,
    put_f,
    put_i,
    put_law,
    put_tile,
)  # fmt: skip


class Pairs(NamedTuple):
    """Rows of a call; the names are those of `walk.Call`, whose helpers take either."""

    chain: Any
    target: Any
    draft: Any
    columns: Any
    sampling: Any
    draft_sampling: Any
    ws: Any
    lists: Any
    draft_lists: Any


@triton.jit
def law_tile(
    ws, lists, rows, offset, bits, row, tile, inv_t, filtered,
    FILTERS: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Partial results of one tile for the row's law; a tile past the end of a shorter row is empty."""
    start = tile * TILE
    if start < rows.vocab:
        x = mask_allowed(load_logits(rows, offset, start, TILE), rows, bits, start, TILE)
        put_tile(ws, row, tile, x, x, start + tl.arange(0, TILE), inv_t, True, False, False)
        if FILTERS:
            if filtered:
                list_tile(ws, lists, row, tile, x, TILE, LISTED)
                sample_tile(ws, lists, row, tile, x, TILE)
    else:
        put_f(ws, F_MAX, row, tile, float("-inf"))
        put_f(ws, F_SUM, row, tile, 0.0)
        put_i(ws, I_ARG, row, tile, 0x7FFFFFFF)
        put_f(ws, F_CUT, row, tile, float("-inf"))
        put_i(ws, I_COUNT, row, tile, 0)


@triton.jit
def law_row(
    ws, lists, rows, row, sampling, b, greedy,
    FILTERS: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Record of a row from its tiles; a threshold below the lists stays open for `law_again`."""
    inv_t, t, k, p, floor, filtered, _, _ = sampling_of(sampling, b, rows.vocab)
    maximum, mass, zsum, bad, argmax = merge_row(ws, row, inv_t, greedy, rows.vocab, T_PAD, False, False)
    if FILTERS:
        if filtered & (bad == 0):
            how = (inv_t, t, k, p, floor)
            threshold, kept, zsum, found = from_lists(ws, lists, row, (maximum, mass), how, T_PAD, LISTED)
            if found:
                put_law(ws, row, maximum, kept, threshold, zsum, b < 0, b < 0)
            else:
                open_row(ws, lists, row, (maximum, mass), how, T_PAD, LISTED, TILE // 32)


@triton.jit
def law_again(ws, lists, rows, offset, bits, row, tile, sampling, b, TILE: tl.constexpr, GATHERED: tl.constexpr):
    """Second pass over a tile of an open row; its last program closes the row. Returns whether this was it."""
    inv_t, t, k, p, floor, _, _, _ = sampling_of(sampling, b, rows.vocab)
    how = (inv_t, t, k, p, floor)
    gather_tile(ws, lists, rows, offset, bits, row, tile, how, None, b, b, False, 0, False, TILE, GATHERED)
    is_last = arrive(ws.tickets + row, ws.tiles)
    if is_last:
        maximum = law_of(ws, row)[0]
        threshold, mass, zsum, closed = close_row(ws, lists, row, how, False, GATHERED)
        if closed == 0:
            threshold, mass, zsum = by_scanning(rows, offset, bits, maximum, how)
        put_law(ws, row, maximum, mass, threshold, zsum, b < 0, b < 0)
    return is_last


@triton.jit
def laws_again_kernel(
    pairs, NT, ND, IS_CHAIN: tl.constexpr, FILTERS: tl.constexpr, DRAFT_FILTERS: tl.constexpr,
    TILE: tl.constexpr, GATHERED: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The rows whose threshold `laws_kernel` left open. Grid: as there; programs of other rows leave at once."""
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % pairs.ws.tiles).to(tl.int32)
    row = pid // pairs.ws.tiles
    b = row // (NT + ND)
    slot = (row % (NT + ND)).to(tl.int32)
    ids, k, bad_id, first, bad, lost = chain_of(pairs.chain, b, pairs.target.vocab, KP)
    is_target = slot < NT
    i = tl.where(is_target, slot, slot - NT)
    used = (IS_CHAIN == 0) | ((i < k) & (lost == 0))
    if used:
        if is_target:
            if FILTERS:
                if get_record_i(pairs.ws, row, Q_STATE, b >= 0) == OPEN:
                    offset = row_offset(pairs.target, pairs.chain, first, b, i, 1)
                    bits = bit_row(pairs.chain, first, b, i)
                    law_again(
                        pairs.ws, pairs.lists, pairs.target, offset, bits, row, tile, pairs.sampling, b, TILE, GATHERED
                    )
        else:
            if DRAFT_FILTERS:
                _, _, _, _, _, _, greedy, _ = sampling_of(pairs.draft_sampling, b, pairs.draft.vocab)
                if greedy == 0:
                    if get_record_i(pairs.ws, row, Q_STATE, b >= 0) == OPEN:
                        offset = row_offset(pairs.draft, pairs.chain, first, b, i, 0)
                        law_again(
                            pairs.ws, pairs.draft_lists, pairs.draft, offset, b, row, tile, pairs.draft_sampling, b,
                            TILE, GATHERED,
                        )  # fmt: skip


@triton.jit
def laws_kernel(
    pairs, NT, ND, IS_CHAIN: tl.constexpr, ROWS: tl.constexpr, FILTERS: tl.constexpr, DRAFT_FILTERS: tl.constexpr,
    LISTED: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Record of every row: maximum, mass = sum of exp((l - max) / T) over the kept ids, threshold, argmax.

    Grid: batch * (NT target + ND draft rows) * tiles; a program owns one tile, the last of a row merges it.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % pairs.ws.tiles).to(tl.int32)
    row = pid // pairs.ws.tiles
    b = row // (NT + ND)
    slot = (row % (NT + ND)).to(tl.int32)
    ids, k, bad_id, first, bad, lost = chain_of(pairs.chain, b, pairs.target.vocab, KP)
    if slot < NT:
        if (IS_CHAIN == 0) | ((slot < k) & (lost == 0)):
            inv_t, _, _, _, _, filtered, greedy, _ = sampling_of(pairs.sampling, b, pairs.target.vocab)
            offset = row_offset(pairs.target, pairs.chain, first, b, slot, 1)
            bits = bit_row(pairs.chain, first, b, slot)
            law_tile(
                pairs.ws, pairs.lists, pairs.target, offset, bits, row, tile, inv_t, filtered, FILTERS, TILE, LISTED
            )
            if arrive(pairs.ws.tickets + row, pairs.ws.tiles):
                law_row(
                    pairs.ws, pairs.lists, pairs.target, row, pairs.sampling, b, greedy,
                    FILTERS, TILE, T_PAD, LISTED,
                )  # fmt: skip
    else:
        if ROWS:
            slot -= NT
            inv_t, _, _, _, _, filtered, greedy, _ = sampling_of(pairs.draft_sampling, b, pairs.draft.vocab)
            if (greedy == 0) & ((IS_CHAIN == 0) | ((slot < k) & (lost == 0))):
                offset = row_offset(pairs.draft, pairs.chain, first, b, slot, 0)
                law_tile(
                    pairs.ws, pairs.draft_lists, pairs.draft, offset, b, row, tile, inv_t, filtered,
                    DRAFT_FILTERS, TILE, LISTED,
                )  # fmt: skip
                if arrive(pairs.ws.tickets + row, pairs.ws.tiles):
                    law_row(
                        pairs.ws, pairs.draft_lists, pairs.draft, row, pairs.draft_sampling, b, b < 0,
                        DRAFT_FILTERS, TILE, T_PAD, LISTED,
                    )  # fmt: skip


@triton.jit
def target_probs(call, b, i, first, row, tile, inv_t, greedy, TILE: tl.constexpr):
    """(masked target logits, p) of one tile of target row i; a greedy row is a point mass at its argmax."""
    start = tile * TILE
    x = load_logits(call.target, row_offset(call.target, call.chain, first, b, i, 1), start, TILE)
    x = mask_allowed(x, call.target, bit_row(call.chain, first, b, i), start, TILE)
    p = prob(x, law_of(call.ws, row), inv_t)
    argmax = get_record_i(call.ws, row, Q_ARG, b >= 0)
    point = (start + tl.arange(0, TILE) == argmax).to(tl.float32)
    return x, tl.where(greedy, point, p)


@triton.jit
def draft_probs(call, b, i, first, row, tile, law, TILE: tl.constexpr):
    """(draft logits, q) of one tile of draft row i, over target ids."""
    v = tile * TILE + tl.arange(0, TILE)
    inv_t, _, _, _, _, _, _, _ = sampling_of(call.draft_sampling, b, call.draft.vocab)
    offset = row_offset(call.draft, call.chain, first, b, i, 0)
    y = draft_tile(call.draft, call.columns, offset, v, call.target.vocab)
    return y, prob(y, law, inv_t)


def launch_laws(pairs: Pairs, rows: int, nt: int, nd: int, *, chain: bool, kp: int) -> None:
    """Laws of all rows: one launch, one more where a filter is on."""
    tiles = pairs.ws.tiles
    shape = {
        "IS_CHAIN": chain, "FILTERS": pairs.lists is not None, "DRAFT_FILTERS": pairs.draft_lists is not None,
        "TILE": host.TILE, "KP": kp,
    }  # fmt: skip
    host.launch(
        laws_kernel, rows * tiles, pairs, nt, nd, ROWS=nd > 0, LISTED=host.LISTED, T_PAD=host.power(tiles), **shape
    )
    if pairs.lists is not None or pairs.draft_lists is not None:
        host.launch(laws_again_kernel, rows * tiles, pairs, nt, nd, GATHERED=host.GATHERED, **shape)
