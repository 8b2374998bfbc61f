# ruff: noqa: SIM109 - `if` on a constexpr prunes code
"""The rules that go down from the root, at one node: which child is accepted, or what its rejections leave to draw."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .codes import NO_LOGPROBS, S_DRAFT, S_ID, S_TARGET, S_ZERO
from .records import Q_ARG, Q_WINNER, R_ENTROPY, get_record_f, get_record_i
from .rows import size_of
from .tree_walk import (
    GREEDY,
    GREEDY_MULTI_DRAFT,
    MATCH,
    NOBODY,
    OUTSIDE,
    RECURSIVE,
    TARGET_ONLY,
    W_DESCENDS,
    W_FIELDS,
    W_STATUS,
    candidates_at,
    draws_from_rows,
    emit,
    emit_logprob,
    end_walk,
    first_of,
    is_bad,
    list_nodes,
    load_nodes,
    masses,
    node_coins,
    node_field,
    plan_draw,
)  # fmt: skip
from .trees import any_of
from .walk import FIXED, NOTHING, PLAIN, POINT, RESIDUAL, logprob_at, pick, typical_limit

SURE = tl.constexpr(0.0625)  # a difference from 1 that keeps its digits; a smaller one is summed anew


class Marks(NamedTuple):
    """What rule typical knows of each accepted node; [batch, nodes]."""

    state: Any  # int32: 0 not accepted, 1 accepted, 2 its row is read
    score: Any  # float64: sum of log p of its path
    logprob: Any  # float32, of its id
    token: Any  # int32: what follows it, -1 if its row is bad
    token_logprob: Any


@triton.jit
def _cover_coin(call, b, node, n, p, tested, NP: tl.constexpr):
    """target_only: one coin u; the first child x_j with u < p(x_1) + .. + p(x_j)."""
    coins = node_coins(call, b, load_nodes(call, call.depth, b, NP), load_nodes(call, call.rank, b, NP))
    u = pick(coins, n, node)
    upto = tl.cumsum(tl.where(tested, p, 0.0).to(tl.float64), axis=0).to(tl.float32)
    return first_of(tested & (p > 0) & (u < upto), n)


@triton.jit
def _reject_in_turn(
    call, b, node, row, draft_row, n, is_child, ids, p, q, coin, bad, bad_draft, inv_t, has_row,
    REPLACEMENT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """recursive: (child, rejected one, C, status).

    C = 0, Z = 1, Q = 0; x is accepted iff u q(x) Z < (p(x) - C q(x)) (1 - Q), else C += Z / (1 - Q),
    Z = sum (p - C q)+, and without replacement Q += q(x). Point masses: iff u Z < p(x), Z = mass of p without those.
    """
    zero = tl.full([], 0.0, tl.float32)
    scale, mass, room, gone = zero, zero + 1.0, zero + 1.0, zero
    status = tl.full([], 0, tl.int32)
    late, rejected = status, status
    child = status + NOBODY
    current = first_of(is_child, n)
    while (current < NOBODY) & (child == NOBODY):
        x, px, qx = pick(ids, n, current), pick(p, n, current), pick(q, n, current)
        u = pick(coin, n, current)
        status |= tl.where(x == OUTSIDE, S_ID, 0)
        status |= tl.where((x >= 0) & (bad == 0) & bad_draft, S_DRAFT, 0)
        if (x >= 0) & (bad == 0) & (bad_draft == 0):
            tried = is_child & (n < current) & (ids >= 0)
            repeats = any_of(tried & (ids == x)) & (has_row == 0)
            status |= tl.where(qx == 0, S_ZERO, 0)
            if late > 0:  # mass and room are those before the last rejection
                if has_row | (1.0 - gone < SURE):
                    count = list_nodes(call, b, n, ids, ids.to(tl.float32) * 0, tried)
                    mass, left = masses(
                        call, b, node, row, draft_row, inv_t, has_row, 1.0, scale, count, ROWS, TILE
                    )  # fmt: skip
                    if not REPLACEMENT:
                        room = tl.where(has_row, left, 1.0)
                else:
                    mass = 1.0 - gone
            rest = tl.where(repeats, 0.0, px - scale * qx)
            if (px > 0) & (qx > 0) & (u * (qx * mass) < rest * room):
                child = current
            else:
                rejected = rejected * 0 + 1
                late = late * 0 + 1
                grows = has_row & (room > 0)
                scale += tl.where(grows, tl.div_rn(mass, tl.where(grows, room, 1.0)), 0.0)
                gone += tl.where(has_row | repeats, 0.0, px)
        current = first_of(is_child & (n > current), n)
    return child, rejected > 0, scale, status


@triton.jit
def _test_last(
    call, b, node, row, draft_row, n, ids, p, q, coin, tested, last, inv_t, has_row,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """greedy_multi_draft: (child, q' = scale q, status). The last child was drawn from q' = norm(q without the others).

    It is accepted iff u q'(x) < p(x).
    """
    others = tested & (n != last)
    gone = tl.sum(tl.where(others & has_row, q, 0.0), axis=0)
    room = 1.0 - gone
    if room < SURE:
        count = list_nodes(call, b, n, ids, p, others)
        _, room = masses(call, b, node, row, draft_row, inv_t, has_row, 0.0, 0.0, count, ROWS, TILE)
    scale = tl.where(room > 0, tl.div_rn(room * 0 + 1.0, tl.where(room > 0, room, 1.0)), 0.0)
    px, qx, u = pick(p, n, last), scale * pick(q, n, last), pick(coin, n, last)
    passes = (px > 0) & (qx > 0) & (u * qx < px)
    return tl.where(passes, last, NOBODY), scale, tl.where(qx == 0, S_ZERO, 0)


@triton.jit
def walk_on(
    call, b, NT, NR, RULE: tl.constexpr, ROW_RULE: tl.constexpr, REPLACEMENT: tl.constexpr, ROWS: tl.constexpr,
    LOGPROBS: tl.constexpr, TILE: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """One step of the rules that stand at one node at a time."""
    node = tl.load(call.queue + b)
    following = tl.full([], -1, tl.int32)
    if node >= 0:
        row = b * NR
        n = tl.arange(0, NP)
        inv_t, greedy, has_row = draws_from_rows(call, b, ROWS)
        ids = load_nodes(call, call.ids, b, NP)
        is_child = (load_nodes(call, call.parent, b, NP) == node) & (n > 0)
        bad = is_bad(call, row)
        tested = is_child & (ids >= 0) & (bad == 0)
        argmax = get_record_i(call.ws, row, Q_ARG, b >= 0)
        how, token = tl.full([], PLAIN, tl.int32), argmax
        status = tl.load(call.walk + b * W_FIELDS + W_STATUS)
        scale, count = tl.full([], 1.0, tl.float32), tl.full([], 0, tl.int32)
        if RULE == MATCH or RULE == GREEDY:
            how = tl.full([], FIXED, tl.int32)
            if RULE == MATCH:
                token = tl.where(greedy, argmax, get_record_i(call.ws, row, Q_WINNER, b >= 0))
            child = first_of(tested & (ids == token), n)
            status |= tl.where(any_of(is_child & (ids == OUTSIDE)), S_ID, 0)
        else:
            p, q, unreadable = candidates_at(
                call, b, node, row, row + NT, ids, tested, inv_t, greedy, has_row, RULE, ROWS
            )  # fmt: skip
            bad_draft = any_of(unreadable)
            coin = node_coins(call, b, load_nodes(call, call.depth, b, NP) - 1, load_nodes(call, call.rank, b, NP))
            if RULE == RECURSIVE:
                child, rejected, scale, bits = _reject_in_turn(
                    call, b, node, row, row + NT, n, is_child, ids, p, q, coin, bad, bad_draft, inv_t, has_row,
                    REPLACEMENT, ROWS, TILE,
                )  # fmt: skip
                status |= bits
                if rejected & (child == NOBODY):
                    how = tl.where(has_row, RESIDUAL, POINT)
                    if has_row == 0:
                        count = list_nodes(call, b, n, ids, p * 0, tested)
            else:
                status |= tl.where(any_of(is_child & (ids == OUTSIDE)), S_ID, 0)
            if RULE == TARGET_ONLY:
                child = _cover_coin(call, b, node, n, p, tested, NP)
                if any_of(tested) & (child == NOBODY):
                    how = tl.full([], POINT, tl.int32)
                    count = list_nodes(call, b, n, ids, p * 0, tested)
            if RULE == GREEDY_MULTI_DRAFT:
                child = tl.full([], NOBODY, tl.int32)
                last = tl.max(tl.where(is_child, n, -1), axis=0)
                tl.store(call.walk + b * W_FIELDS + W_DESCENDS, tl.where(bad_draft, 0, 1))
                status |= tl.where(bad_draft & any_of(tested & (n == last)), S_DRAFT, 0)
                if greedy:
                    child = first_of(tested & (ids == argmax), n)
                elif any_of(tested & (n == last)) & (bad_draft == 0):
                    child, scale, bits = _test_last(
                        call, b, node, row, row + NT, n, ids, p, q, coin, tested, last, inv_t, has_row, ROWS, TILE
                    )  # fmt: skip
                    status |= bits
                    if child == NOBODY:
                        how = tl.where(has_row, RESIDUAL, POINT)
                        # What q' leaves out keeps all of p; a point mass takes its id from p.
                        listed = tested & (has_row == (n != last))
                        count = list_nodes(call, b, n, ids, tl.where(has_row, p, 0.0), listed)
            how = tl.where(greedy, FIXED, how)
            tl.store(call.scale + b * 2, scale * 0 + 1.0)
            tl.store(call.scale + b * 2 + 1, scale)
            if RULE == RECURSIVE:
                count = tl.where(has_row, 0, count)
        if child < NOBODY:
            depth = node_field(call, call.depth, b, node)
            emit(call, b, depth, pick(ids, n, child), child)
            emit_logprob(call, b, depth, pick(ids, n, child), node, row, ROW_RULE, LOGPROBS)
            plan_draw(call, b, node, 0, NOTHING, status, 0)
            following = child
        else:
            end_walk(call, b, node, row, 0, how, token, status, count, ROW_RULE, LOGPROBS)
    tl.store(call.following + b, following)


@triton.jit
def descends(call, b, node, token, NP: tl.constexpr):
    """greedy_multi_draft: the child, but the last, that carries the drawn token."""
    n = tl.arange(0, NP)
    is_child = (load_nodes(call, call.parent, b, NP) == node) & (n > 0)
    last = tl.max(tl.where(is_child, n, -1), axis=0)
    return first_of(is_child & (n != last) & (load_nodes(call, call.ids, b, NP) == token), n)


@triton.jit
def _accept_typical(
    call, b, node, row, n, ids, parent, inv_t, greedy, ROW_RULE: tl.constexpr, LOGPROBS: tl.constexpr
):  # fmt: skip
    """Accept children by p(x) > min(epsilon, delta exp(-H)); mark what follows the node. Returns status bits."""
    at = b * size_of(call.nodes)
    is_child = (parent == node) & (n > 0)
    bad = is_bad(call, row)
    tested = is_child & (ids >= 0) & (bad == 0)
    p, _, _ = candidates_at(call, b, node, row, row, ids, tested, inv_t, greedy, b < 0, ROW_RULE, False)
    entropy = get_record_f(call.ws, row, R_ENTROPY, b >= 0)
    passes = tested & (p > 0) & (p > typical_limit(call.knobs.typical, b, entropy))
    score = tl.load(call.marks.score + at + node) + tl.log(tl.where(passes, p, 1.0).to(tl.float64))
    tl.store(call.marks.score + at + n, score, mask=passes)
    tl.store(call.marks.state + at + n, n * 0 + 1, mask=passes)
    argmax = get_record_i(call.ws, row, Q_ARG, b >= 0)
    token = tl.where(greedy, argmax, get_record_i(call.ws, row, Q_WINNER, b >= 0))
    token = tl.where(bad, -1, token)
    tl.store(call.marks.state + at + node, 2)
    tl.store(call.marks.token + at + node, token)
    if LOGPROBS != NO_LOGPROBS:
        above = n * 0 + node
        value = logprob_at(call, b, b * 0, above, ids, passes, tl.where(passes, row, -1), ROW_RULE, LOGPROBS)
        tl.store(call.marks.logprob + at + n, value, mask=passes)
        value = logprob_at(call, b, b * 0, node, token, token >= 0, row, ROW_RULE, LOGPROBS)
        tl.store(call.marks.token_logprob + at + node, value)
    tl.debug_barrier()
    return tl.where(any_of(is_child & (ids == OUTSIDE)), S_ID, 0) | tl.where(bad, S_TARGET, 0)


@triton.jit
def walk_typical(
    call, b, NT, NR, ROW_RULE: tl.constexpr, LOGPROBS: tl.constexpr, NP: tl.constexpr
):  # fmt: skip
    """Every accepted node is looked at; in the end the deepest, then the likeliest, then the lowest one stands."""
    n = tl.arange(0, NP)
    at = b * size_of(call.nodes)
    status = tl.load(call.walk + b * W_FIELDS + W_STATUS)
    walking = tl.load(call.queue + b * NT) >= 0
    slots = tl.arange(0, NP)
    tl.store(call.following + b * NT + slots, slots * 0 - 1, mask=slots < NT)
    if walking:
        inv_t, greedy, _ = draws_from_rows(call, b, False)
        ids, parent = load_nodes(call, call.ids, b, NP), load_nodes(call, call.parent, b, NP)
        for i in range(0, NT):
            node = tl.load(call.queue + b * NT + i)
            if node >= 0:
                status |= _accept_typical(
                    call, b, node, b * NR + i, n, ids, parent, inv_t, greedy, ROW_RULE, LOGPROBS
                )  # fmt: skip
        state = tl.load(call.marks.state + at + n, mask=n < size_of(call.nodes), other=0)
        waits = (state == 1) & (load_nodes(call, call.children, b, NP) > 0)
        if any_of(waits) == 0:
            score = tl.load(call.marks.score + at + n, mask=n < size_of(call.nodes), other=0.0)
            depth = tl.where(state > 0, load_nodes(call, call.depth, b, NP), -1)
            deepest = depth == tl.max(depth, axis=0)
            best = tl.max(tl.where(deepest, score, float("-inf")), axis=0)
            stand = first_of(deepest & (score == best), n)
            waits = (n == stand) & (state == 1)  # a leaf: its row is still to be read
            if any_of(waits) == 0:
                _write_best(call, b, stand, status, LOGPROBS)
        place = tl.cumsum(waits.to(tl.int32), axis=0) - 1
        tl.store(call.following + b * NT + place, n, mask=waits & (place < NT))
        tl.store(call.walk + b * W_FIELDS + W_STATUS, status)


@triton.jit
def _write_best(call, b, stand, status, LOGPROBS: tl.constexpr):
    """The path to the accepted node, and the token after it."""
    width = size_of(call.max_depth) + 1
    depth = node_field(call, call.depth, b, stand)
    token = tl.load(call.marks.token + b * size_of(call.nodes) + stand)
    emit(call, b, depth, token, -1)
    if LOGPROBS != NO_LOGPROBS:
        value = tl.load(call.marks.token_logprob + b * size_of(call.nodes) + stand)
        tl.store(call.logprobs + b * width + depth, value)
    tl.store(call.num_accepted + b, depth)
    tl.store(call.status + b, status)
    node = stand
    for i in range(0, depth):
        column = depth - 1 - i
        emit(call, b, column, node_field(call, call.ids, b, node), node)
        if LOGPROBS != NO_LOGPROBS:
            value = tl.load(call.marks.logprob + b * size_of(call.nodes) + node)
            tl.store(call.logprobs + b * width + column, value)
        node = node_field(call, call.parent, b, node)
