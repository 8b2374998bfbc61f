"""Traversal verification (Weng et al.): leaves first, in depth-first order. One program a request, a lane a node.

weight(root) = 1, weight(child) = min(1, weight p(x) / q(x)). The first leaf is accepted iff its coin < its weight;
else it is deleted, and at its parent, with S = sum (weight p - q)+:
p = norm((weight p - q)+), weight = S / (S + 1 - weight), q = norm(q without x).
Of an id that is not deleted p is (a p - b q)+ / mass, with three numbers a node; of a deleted one its rest is kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import S_DRAFT, S_EMPTY, S_ID, S_TARGET, S_ZERO
from .records import BAD, Q_ARG, Q_STATE, get_record_i
from .tree_rules import SURE
from .tree_walk import (
    NOBODY,
    OUTSIDE,
    TRAVERSAL,
    W_FIELDS,
    W_STATUS,
    candidates_at,
    draws_from_rows,
    emit,
    emit_logprob,
    end_walk,
    first_of,
    list_nodes,
    load_nodes,
    masses,
    node_coins,
    node_field,
)  # fmt: skip
from .trees import any_of, at_nodes
from .walk import FIXED, PLAIN, POINT, RESIDUAL, pick


@triton.jit
def _ratio(x, y):
    """Quotient, 0 where y is 0."""
    return tl.where(y > 0, tl.div_rn(x, tl.where(y > 0, y, 1.0)), 0.0)


@triton.jit
def _put(values, n, node, value):
    """A vector with one entry replaced."""
    return tl.where(n == node, value, values)


@triton.jit
def _left_of(n, above, x, p, q, a, scale, has_row):
    """(a p - b q)+ of the id of a child that is not deleted."""
    left = tl.maximum(pick(a, n, above) * pick(p, n, x) - pick(scale, n, above) * pick(q, n, x), 0.0)
    return tl.where(has_row, left, pick(p, n, x))


@triton.jit
def _examine(n, parent, depth, ids, p, q, bad, unreadable, greedy, max_depth):
    """(nodes that take part, status): behind a bad row, and below what is no id, everything is cut off."""
    alive, weight = n == 0, tl.where(n == 0, 1.0, 0.0)
    status = tl.full([], 0, tl.int32)
    for d in range(1, max_depth + 1):
        above = at_nodes(weight, parent)
        # A greedy request is decided at its first miss; what lies behind is not examined.
        here = (depth == d) & (at_nodes(alive.to(tl.int32), parent) > 0) & ((greedy == 0) | (above > 0))
        status |= tl.where(any_of(here & (ids == OUTSIDE)), S_ID, 0)
        here = here & (ids >= 0) & (at_nodes(bad.to(tl.int32), parent) == 0)
        status |= tl.where(any_of(here & unreadable), S_DRAFT, 0)
        here = here & (unreadable == 0)
        status |= tl.where(any_of(here & (q == 0)), S_ZERO, 0)
        alive = alive | here
        weight = tl.where(here, tl.minimum(above * _ratio(p, q), 1.0), weight)
    misses = greedy & (weight == 0)
    return alive, status | tl.where(any_of(alive & bad & (misses == 0)), S_TARGET, 0)


@triton.jit
def _emit_path(call, b, node, NR, LOGPROBS: tl.constexpr):
    """The accepted tokens, from the last one up."""
    for _ in range(0, node_field(call, call.depth, b, node)):
        above, column = node_field(call, call.parent, b, node), node_field(call, call.depth, b, node) - 1
        token = node_field(call, call.ids, b, node)
        emit(call, b, column, token, node)
        emit_logprob(call, b, column, token, above, b * NR + above, 0, LOGPROBS)
        node = above


@triton.jit
def traverse(call, b, NT, NR, LOGPROBS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, NP: tl.constexpr):
    """Walk of a request, all of whose rows are known."""
    n = tl.arange(0, NP)
    inv_t, greedy, has_row = draws_from_rows(call, b, ROWS)
    parent, depth = load_nodes(call, call.parent, b, NP), load_nodes(call, call.depth, b, NP)
    ids = load_nodes(call, call.ids, b, NP)
    coin = node_coins(call, b, depth - 1, load_nodes(call, call.rank, b, NP))
    there = depth >= 0
    bad = there & (get_record_i(call.ws, b * NR + n, Q_STATE, there) == BAD)
    tested = there & (ids >= 0) & (at_nodes(bad.to(tl.int32), parent) == 0)
    f = tl.maximum(parent, 0)
    p, q, unreadable = candidates_at(
        call, b, f, b * NR + f, b * NR + NT + f, ids, tested, inv_t, greedy, has_row, TRAVERSAL, ROWS
    )  # fmt: skip
    alive, status = _examine(n, parent, depth, ids, p, q, bad, unreadable, greedy, tl.max(depth, axis=0))
    status |= tl.load(call.walk + b * W_FIELDS + W_STATUS)

    # A lane holds its node's own numbers (weight, what is left of its id) and those of the laws below it.
    one = tl.full([NP], 1.0, tl.float32)
    a, scale, mass, room, gone = one, one * 0, one, one, one * 0
    weight, left = one, one * 0
    deleted, empty = n < 0, n < 0
    node, stands = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    while stands == 0:
        child = first_of(alive & (parent == node), n)
        while child < NOBODY:
            px = _left_of(n, node, child, p, q, a, scale, has_row)
            qx = tl.where(has_row, _ratio(pick(q, n, child), pick(room, n, node)), 1.0)
            fresh = tl.minimum(pick(weight, n, node) * _ratio(_ratio(px, pick(mass, n, node)), qx), 1.0)
            is_fixed = any_of(deleted & (parent == child))
            weight = _put(weight, n, child, tl.where(is_fixed, pick(weight, n, child), fresh))
            node = child
            child = first_of(alive & (parent == node), n)
        stands = tl.where((node == 0) | (pick(coin, n, node) < pick(weight, n, node)), 1, 0)
        if stands == 0:
            x, above = node, node_field(call, call.parent, b, node)
            w, m = pick(weight, n, above), pick(mass, n, above)
            siblings = deleted & (parent == above)
            before = _ratio(_left_of(n, above, x, p, q, a, scale, has_row), m)
            gone = _put(gone, n, above, pick(gone, n, above) + tl.where(has_row, 0.0, pick(p, n, x)))
            next_a, next_scale = w * _ratio(pick(a, n, above), m), w * _ratio(pick(scale, n, above), m)
            next_scale += _ratio(w * 0 + 1.0, pick(room, n, above))
            at_x = tl.maximum(next_a * pick(p, n, x) - next_scale * pick(q, n, x), 0.0)
            excess = 1.0 - pick(gone, n, above)
            if has_row | (excess < SURE):
                listed = tl.where(has_row, tl.where(n == x, at_x, w * left), 0.0)
                count = list_nodes(call, b, n, ids, listed, siblings | (n == x))
                next_a, next_scale = tl.where(has_row, next_a, 1.0), tl.where(has_row, next_scale, 0.0)
                excess, rest = masses(
                    call, b, above, b * NR + above, b * NR + NT + above, inv_t, has_row, next_a, next_scale, count,
                    ROWS, TILE,
                )  # fmt: skip
                room = _put(room, n, above, tl.where(has_row, rest, 1.0))
            total = tl.where(has_row, excess, w * _ratio(excess, m))
            free = total + (1.0 - w)
            weight = _put(weight, n, above, tl.where(free > 0, _ratio(total, free), 1.0))
            deleted, alive = deleted | (n == x), alive & (n != x)
            empty = empty | (n == tl.where(total <= 0, above, -1))
            if total > 0:
                left = tl.where(siblings, _ratio(w * left, excess), left)
                left = _put(left, n, x, _ratio(at_x, excess))
                mass = _put(mass, n, above, excess)
                if has_row:
                    a, scale = _put(a, n, above, next_a), _put(scale, n, above, next_scale)
            else:
                left = _put(left, n, x, before)
            node = above

    below = deleted & (parent == node)
    how, count = tl.full([], PLAIN, tl.int32), tl.full([], 0, tl.int32)
    if any_of(below):
        is_empty = has_row & any_of(empty & (n == node))
        status |= tl.where(is_empty, S_EMPTY, 0)
        how = tl.where(is_empty, PLAIN, tl.where(has_row, RESIDUAL, POINT))
        count = list_nodes(call, b, n, ids, tl.where(has_row, left * pick(mass, n, node), 0.0), below)
    how = tl.where(greedy, FIXED, how)
    tl.store(call.scale + b * 2, pick(a, n, node))
    tl.store(call.scale + b * 2 + 1, pick(scale, n, node))
    argmax = get_record_i(call.ws, b * NR + node, Q_ARG, b >= 0)
    end_walk(call, b, node, b * NR + node, node, how, argmax, status, count, 0, LOGPROBS)
    _emit_path(call, b, node, NR, LOGPROBS)
