# ruff: noqa: RUF059, SIM102, SIM109 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""The rows of a chain: statistics of each, once; the walk by whoever comes last. What `verify_chain` launches first."""

from __future__ import annotations

import triton
import triton.language as tl

from .brackets import close_row, gather_tile, open_row, race_closed, sample_tile
from .chains import bit_row, chain_of, row_offset
from .codes import PROCESSED_LOGPROBS, RAW_LOGPROBS, RESIDUAL_PURPOSE, TARGET_PURPOSE
from .filters import by_scanning, from_lists, list_tile, race_in_lists, race_in_row
from .handshake import arrive
from .laws import law_of
from .noise import tile_noise
from .pairs import law_again, law_row, law_tile
from .race import race_scores, winner
from .rows import load_logits, mask_allowed, sampling_of
from .stats import (
    F_SCORE,
    I_RANK,
    I_WINNER,
    OPEN,
    Q_ARG,
    Q_FIELDS,
    Q_RANK,
    Q_STATE,
    Q_WINNER,
    get_f,
    get_i,
    get_record_i,
    merge_row,
    put_f,
    put_i,
    put_law,
    put_tile,
)  # fmt: skip
from .walk import (
    BLOCK,
    D_FIELDS,
    D_HOW,
    D_STATUS,
    D_TOKEN,
    MATCH,
    RATIO,
    TOPM,
    TYPICAL,
    settle_block,
    target_logits_at,
    walk_block,
    walk_ratio,
    walk_target,
    write_outputs,
)  # fmt: skip


@triton.jit
def _finish(
    call, b, KP: tl.constexpr, NT, NR, RULE: tl.constexpr, ROWS: tl.constexpr, STATS: tl.constexpr,
    LOGPROBS: tl.constexpr,
):  # fmt: skip
    """The walk of request b, by the program that came last."""
    if RULE == RATIO:
        walk_ratio(call, b, KP, NT, NR, ROWS, STATS)
    elif RULE == BLOCK:
        pending, lost = walk_block(call, b, KP, NT, NR, ROWS, STATS)
        if pending == 0:
            settle_block(call, b, tl.zeros([KP], tl.float32), KP, NR, lost)
    else:
        walk_target(call, b, KP, NR, RULE)
        tl.debug_barrier()
        at = call.decision + b * D_FIELDS
        token, how, status = tl.load(at + D_TOKEN), tl.load(at + D_HOW), tl.load(at + D_STATUS)
        write_outputs(call, b, KP, NR, RULE, LOGPROBS, token, how, status)


@triton.jit
def target_tile(
    call, b, i, place, row, tile, ids, first, inv_t, greedy, TILE: tl.constexpr, KP: tl.constexpr, RULE: tl.constexpr,
    filtered, LOGPROBS: tl.constexpr, FILTERS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Partial results of one tile of target row i, whose draw is that of the position `place`."""
    start = tile * TILE
    v = start + tl.arange(0, TILE)
    raw = load_logits(call.target, row_offset(call.target, call.chain, first, b, i, 1), start, TILE)
    x = mask_allowed(raw, call.target, bit_row(call.chain, first, b, i), start, TILE)
    # The sum: of a law, of processed log-probabilities, and of which top-p is a share.
    SUM: tl.constexpr = RULE <= BLOCK or RULE == TYPICAL or LOGPROBS == PROCESSED_LOGPROBS or FILTERS
    put_tile(call.ws, row, tile, x, raw, v, inv_t, SUM, RULE == TYPICAL, LOGPROBS == RAW_LOGPROBS)
    if FILTERS:
        if filtered:
            list_tile(call.ws, call.lists, row, tile, x, TILE, LISTED)
            sample_tile(call.ws, call.lists, row, tile, x, TILE)
    if RULE == MATCH or RULE == TYPICAL:
        if (greedy == 0) & (filtered == 0):
            PURPOSE: tl.constexpr = TARGET_PURPOSE if RULE == MATCH else RESIDUAL_PURPOSE
            neg_log_e = tile_noise(call.noise, b, tl.load(call.noise.position + b) + place, PURPOSE, start, TILE)
            best, at = winner(race_scores(x * inv_t, x > float("-inf"), neg_log_e), v)
            put_f(call.ws, F_SCORE, row, tile, best)
            put_i(call.ws, I_WINNER, row, tile, at)
    if RULE == TOPM:
        j = tl.arange(0, KP)
        drafted = tl.sum(tl.where(j == i, ids, 0), axis=0)  # -1 behind the last id: then nothing is asked
        logit = tl.max(
            target_logits_at(call, b, first, j, ids, (j == i) & (ids >= 0) & (ids < call.target.vocab)), axis=0
        )
        before = (x > logit) | ((x == logit) & (v < drafted) & (v < call.target.vocab))
        put_i(call.ws, I_RANK, row, tile, tl.sum(before.to(tl.int32), axis=0))


@triton.jit
def _put_winner(call, row, best, at, argmax):
    """Winner of a row's race; where every score overflowed, the largest logit wins."""
    tl.store(call.ws.record_i + row * Q_FIELDS + Q_WINNER, tl.where(best > float("-inf"), at, argmax))


@triton.jit
def _filter_target(
    call, b, place, row, maximum, mass, argmax, RULE: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Law of a filtered target row from its lists, and its race; below the lists the row stays open."""
    inv_t, t, k, p, floor, _, _, _ = sampling_of(call.sampling, b, call.target.vocab)
    how = (inv_t, t, k, p, floor)
    threshold, kept_mass, zsum, found = from_lists(call.ws, call.lists, row, (maximum, mass), how, T_PAD, LISTED)
    if found:
        put_law(call.ws, row, maximum, kept_mass, threshold, zsum, b < 0, b < 0)
        if RULE == MATCH or RULE == TYPICAL:
            PURPOSE: tl.constexpr = TARGET_PURPOSE if RULE == MATCH else RESIDUAL_PURPOSE
            best, at = race_in_lists(
                call.ws, call.lists, row, threshold, inv_t, call.noise, b, tl.load(call.noise.position + b) + place,
                PURPOSE, TILE, T_PAD, LISTED,
            )  # fmt: skip
            _put_winner(call, row, best, at, argmax)
    else:
        open_row(call.ws, call.lists, row, (maximum, mass), how, T_PAD, LISTED, TILE // 32)


@triton.jit
def target_again(
    call,
    b,
    i,
    place,
    row,
    first,
    tile,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
    T_PAD: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """Second pass over a tile of an open target row; its last program closes the row. Returns whether this was it."""
    inv_t, t, k, p, floor, _, _, _ = sampling_of(call.sampling, b, call.target.vocab)
    how = (inv_t, t, k, p, floor)
    RACE: tl.constexpr = RULE == MATCH or RULE == TYPICAL
    PURPOSE: tl.constexpr = TARGET_PURPOSE if RULE == MATCH else RESIDUAL_PURPOSE
    offset = row_offset(call.target, call.chain, first, b, i, 1)
    bits = bit_row(call.chain, first, b, i)
    position = tl.load(call.noise.position + b) + place
    gather_tile(
        call.ws, call.lists, call.target, offset, bits, row, tile, how, call.noise, b, position,
        RACE, PURPOSE, RULE == TYPICAL, TILE, GATHERED,
    )  # fmt: skip
    is_last = arrive(call.ws.tickets + row, call.ws.tiles)
    if is_last:
        maximum = law_of(call.ws, row)[0]
        threshold, mass, zsum, closed = close_row(call.ws, call.lists, row, how, RULE == TYPICAL, GATHERED)
        if closed == 0:
            threshold, mass, zsum = by_scanning(call.target, offset, bits, maximum, how)
        put_law(call.ws, row, maximum, mass, threshold, zsum, b < 0, b < 0)
        if RACE:
            argmax = get_record_i(call.ws, row, Q_ARG, b >= 0)
            if closed:
                best, at = race_closed(
                    call.ws, call.lists, row, threshold, inv_t, call.noise, b, position, PURPOSE, T_PAD, GATHERED
                )
            else:
                best, at = race_in_row(call.target, offset, bits, threshold, inv_t, call.noise, b, position, PURPOSE)
            _put_winner(call, row, best, at, argmax)
    return is_last


@triton.jit
def merge_target(
    call, b, place, row, inv_t, greedy, filtered, RULE: tl.constexpr, LOGPROBS: tl.constexpr,
    FILTERS: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Record of a target row from its tiles."""
    maximum, mass, _, bad, argmax = merge_row(
        call.ws, row, inv_t, greedy, call.target.vocab, T_PAD, RULE == TYPICAL, LOGPROBS == RAW_LOGPROBS
    )
    if RULE == MATCH or RULE == TYPICAL:
        if (greedy == 0) & (filtered == 0):
            best, at = winner(
                get_f(call.ws, F_SCORE, row, T_PAD, float("-inf")), get_i(call.ws, I_WINNER, row, T_PAD, 0x7FFFFFFF)
            )
            _put_winner(call, row, best, at, argmax)
    if RULE == TOPM:
        rank = tl.sum(get_i(call.ws, I_RANK, row, T_PAD, 0), axis=0)
        tl.store(call.ws.record_i + row * Q_FIELDS + Q_RANK, rank)
    if FILTERS:
        if filtered & (bad == 0):
            _filter_target(call, b, place, row, maximum, mass, argmax, RULE, TILE, T_PAD, LISTED)


@triton.jit
def rows_kernel(
    call, NT, ND, tickets_b,
    RULE: tl.constexpr, ROWS: tl.constexpr, STATS: tl.constexpr, LOGPROBS: tl.constexpr,
    FILTERS: tl.constexpr, DRAFT_FILTERS: tl.constexpr, LISTED: tl.constexpr,
    TILE: tl.constexpr, T_PAD: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Row statistics: maximum, argmax, sum exp((l - max) / T), and what the rule asks of each row.

    Grid: batch * (target rows + draft rows) * tiles; a program owns one tile of one row. The last program of a row
    merges it, the last row of a request walks the chain.
    """
    pid = tl.program_id(0).to(tl.int64)
    tiles = call.ws.tiles
    tile = (pid % tiles).to(tl.int32)
    row = pid // tiles
    NR = NT + ND
    b = row // NR
    slot = (row % NR).to(tl.int32)
    ids, k, _, first, _, lost = chain_of(call.chain, b, call.target.vocab, KP)
    inv_t = tl.full([], 1.0, tl.float32)
    greedy = b < 0
    filtered = b < 0
    if RULE <= MATCH or RULE == TYPICAL:
        inv_t, _, _, _, _, filtered, greedy, _ = sampling_of(call.sampling, b, call.target.vocab)
    i = slot
    used = (slot <= k) & (lost == 0)
    is_target = slot < NT
    if ROWS:
        draft_inv_t, _, _, _, _, draft_filtered, draft_greedy, _ = sampling_of(call.draft_sampling, b, call.draft.vocab)
        if is_target == 0:
            i = slot - NT
            used = (i < k) & (lost == 0) & (greedy == 0) & (draft_greedy == 0)
            if used:
                offset = row_offset(call.draft, call.chain, first, b, i, 0)
                law_tile(
                    call.ws, call.draft_lists, call.draft, offset, b, row, tile, draft_inv_t, draft_filtered,
                    DRAFT_FILTERS, TILE, LISTED,
                )  # fmt: skip
    if is_target & used:
        target_tile(
            call, b, i, i, row, tile, ids, first, inv_t, greedy, TILE, KP, RULE, filtered, LOGPROBS, FILTERS, LISTED
        )
    row_done = tile == 0
    if used:
        row_done = arrive(call.ws.tickets + row, tiles)
        if row_done:
            if is_target:
                merge_target(call, b, i, row, inv_t, greedy, filtered, RULE, LOGPROBS, FILTERS, TILE, T_PAD, LISTED)
            else:
                if ROWS:
                    law_row(
                        call.ws, call.draft_lists, call.draft, row, call.draft_sampling, b, b < 0,
                        DRAFT_FILTERS, TILE, T_PAD, LISTED,
                    )  # fmt: skip
    if row_done and not (FILTERS or DRAFT_FILTERS):
        if arrive(call.ws.tickets + tickets_b + b, NR):
            _finish(call, b, KP, NT, NR, RULE, ROWS, STATS, LOGPROBS)


@triton.jit
def rows_again_kernel(
    call, NT, ND, tickets_b,
    RULE: tl.constexpr, ROWS: tl.constexpr, STATS: tl.constexpr, LOGPROBS: tl.constexpr,
    FILTERS: tl.constexpr, DRAFT_FILTERS: tl.constexpr, GATHERED: tl.constexpr,
    TILE: tl.constexpr, T_PAD: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Rows whose threshold lies below their lists are read once more; then the walk.

    Grid: as `rows_kernel`. Programs of rows that are settled leave at once.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % call.ws.tiles).to(tl.int32)
    row = pid // call.ws.tiles
    NR = NT + ND
    b = row // NR
    slot = (row % NR).to(tl.int32)
    ids, k, _, first, _, lost = chain_of(call.chain, b, call.target.vocab, KP)
    row_done = tile == 0
    if slot < NT:
        if FILTERS:
            if (slot <= k) & (lost == 0):
                if get_record_i(call.ws, row, Q_STATE, b >= 0) == OPEN:
                    row_done = target_again(call, b, slot, slot, row, first, tile, RULE, TILE, T_PAD, GATHERED)
    else:
        if DRAFT_FILTERS:
            _, _, _, _, _, _, greedy, _ = sampling_of(call.sampling, b, call.target.vocab)
            _, _, _, _, _, _, draft_greedy, _ = sampling_of(call.draft_sampling, b, call.draft.vocab)
            if (slot - NT < k) & (lost == 0) & (greedy == 0) & (draft_greedy == 0):
                if get_record_i(call.ws, row, Q_STATE, b >= 0) == OPEN:
                    offset = row_offset(call.draft, call.chain, first, b, slot - NT, 0)
                    row_done = law_again(
                        call.ws, call.draft_lists, call.draft, offset, b, row, tile, call.draft_sampling, b,
                        TILE, GATHERED,
                    )  # fmt: skip
    if row_done:
        if arrive(call.ws.tickets + tickets_b + b, NR):
            _finish(call, b, KP, NT, NR, RULE, ROWS, STATS, LOGPROBS)
