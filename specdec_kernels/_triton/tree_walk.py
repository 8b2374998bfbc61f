# ruff: noqa: SIM102 - `if` on a constexpr prunes code
"""A walk through a tree of candidates: the tables of its nodes, what is asked of a node's children, how it ends.

`chain_of` and its like see a tree as a chain whose row i is that of node i. The nodes whose rows are read next stand in
a queue.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .._codes import TREE_RULES
from .chains import number_of, row_offset
from .codes import NO_LOGPROBS, S_LAYOUT, S_SAMPLING, S_TARGET
from .kept import kept_masses
from .launch import entry
from .laws import law_of, prob
from .noise import coins
from .pairs import draft_probs, target_probs
from .plan import put_row
from .records import BAD, Q_ARG, Q_STATE, get_record_i
from .rows import is_active, sampling_of, size_of
from .trees import any_of, children_of, neighbours, root_only, tree_of
from .walk import FIXED, NOTHING, draft_at, logprob_at, target_logits_at

MATCH, GREEDY, TYPICAL, RECURSIVE, GREEDY_MULTI_DRAFT, TARGET_ONLY, TRAVERSAL = map(tl.constexpr, TREE_RULES.values())
# Walk of a request, int32: status; the draw that ends it: how, at which node, from which record, how many
# listed ids; and whether a drawn token may be a child.
W_STATUS, W_HOW, W_NODE, W_SLOT, W_LISTED, W_DESCENDS, W_FIELDS = (tl.constexpr(i) for i in range(7))
OUTSIDE = tl.constexpr(-2)  # an id that is none
NOBODY = tl.constexpr(0x7FFFFFFF)  # a node behind all nodes


class Walk(NamedTuple):
    """What a verification of trees reads and writes; names shared with `walk.Call` mean the same."""

    chain: Any
    target: Any
    draft: Any
    columns: Any
    sampling: Any
    draft_sampling: Any
    noise: Any
    knobs: Any
    ws: Any
    plan: Any
    nodes: Any  # `launch.size`, as the next
    max_depth: Any
    parent: Any  # checked, int32 [batch, nodes] as are the next four
    depth: Any
    rank: Any  # among the nodes of its depth
    ids: Any  # -1 none, -2 outside the vocabulary
    children: Any  # how many
    queue: Any  # int32 [batch, NT]: nodes whose rows this launch reads, -1 for none
    following: Any  # ... and the next
    walk: Any  # int32 [batch, W_FIELDS]
    scale: Any  # float32 [batch, 2]: a and b of the draw from (a p - b q)+
    listed: Any  # int32 [batch, nodes]: ids whose weight in the draw is ...
    listed_weight: Any  # float32 [batch, nodes]
    marks: Any  # rule typical: Marks
    token_ids: Any
    path: Any
    num_accepted: Any
    status: Any
    logprobs: Any


@triton.jit
def plan_nodes(call, b, slot, node, depth, children, NT, ND, ROWS: tl.constexpr):
    """Plan the rows of queued nodes (vectors): a draft row only where something was drawn from it."""
    there = node >= 0
    inv_t, _, has_row = draws_from_rows(call, b, ROWS)
    row = b * (NT + ND) + slot
    node = tl.maximum(node, 0)
    position = tl.load(call.noise.position + b) + depth
    first = b * 0
    offset = tl.where(there, row_offset(call.target, call.chain, first, b, node, 1), -1)
    number = number_of(call.chain, first, b, node)
    put_row(call.plan, row, offset, number, position, inv_t + slot * 0.0, slot < NT)
    if ROWS:
        draft_inv_t = sampling_of(call.draft_sampling, b, call.draft.vocab).inv_t
        offset = tl.where(there & has_row & (children > 0), row_offset(call.draft, call.chain, first, b, node, 0), -1)
        put_row(call.plan, row + NT, offset, -1 - number, position, draft_inv_t + slot * 0.0, slot < ND)


@triton.jit
def plan_queue(call, b, NT, ND, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """Plan the rows of the nodes that come next."""
    slot = tl.arange(0, SLOTS)
    node = tl.load(call.following + b * NT + slot, mask=slot < NT, other=-1)
    at = b * size_of(call.nodes) + tl.maximum(node, 0)
    plan_nodes(call, b, slot, node, tl.load(call.depth + at), tl.load(call.children + at), NT, ND, ROWS)


@entry
def open_kernel(
    call, raw_ids, parents, NT, ND, RULE: tl.constexpr, REPLACEMENT: tl.constexpr, READS_DRAFT: tl.constexpr,
    ROWS: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Checks the tree, ranks its nodes, empties the results, queues and plans the root, or all nodes. Grid: batch.

    It alone reads ids and parents as they were given, [batch, nodes]: no other kernel is compiled for their dtypes.
    """
    call = Walk(*call)
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    parent, depth, bad = tree_of(parents, b, size_of(call.nodes), size_of(call.max_depth), NP)
    nodes = size_of(call.nodes)
    raw = tl.load(raw_ids + b * nodes + n, mask=(n > 0) & (n < nodes), other=-1).to(tl.int64)
    ids = tl.where((raw < -1) | (raw >= call.target.vocab), OUTSIDE, raw).to(tl.int32)
    if not REPLACEMENT:
        named = (parent >= 0) & (ids >= 0)
        ordered = tl.sort(tl.where(named, (parent.to(tl.int64) << 32) | ids.to(tl.int64), -1 - n.to(tl.int64)))
        before, _ = neighbours(ordered, NP)
        bad = bad | any_of((n > 0) & (before == ordered))
        parent, depth = root_only(parent, depth, bad, NP)

    # In the order (depth, node) a node's rank is how far behind the first of its depth it stands.
    ordered = tl.sort(tl.where(depth >= 0, depth, NP) * NP + n)
    levels = tl.histogram(tl.maximum(depth, 0), NP, mask=depth >= 0)
    first = tl.cumsum(levels, axis=0) - levels
    rank = n - tl.gather(first, tl.minimum(ordered // NP, NP - 1), 0)
    at = b * size_of(call.nodes) + n
    tl.store(call.rank + b * size_of(call.nodes) + ordered % NP, rank, mask=ordered % NP < size_of(call.nodes))
    tl.store(call.parent + at, parent, mask=n < size_of(call.nodes))
    tl.store(call.depth + at, depth, mask=n < size_of(call.nodes))
    tl.store(call.ids + at, ids, mask=n < size_of(call.nodes))
    children = children_of(parent, NP)
    tl.store(call.children + at, children, mask=n < size_of(call.nodes))
    active = is_active(call.sampling, b)
    queued = active & ((depth >= 0) if RULE == TRAVERSAL else (n == 0))
    tl.store(call.queue + b * NT + n, tl.where(queued, n, -1), mask=n < NT)
    plan_nodes(call, b, n, tl.where(queued, n, -1), depth, children, NT, ND, ROWS)
    if RULE == TYPICAL:
        tl.store(call.marks.state + at, (n == 0).to(tl.int32), mask=n < size_of(call.nodes))
        tl.store(call.marks.score + at, n.to(tl.float64) * 0, mask=n < size_of(call.nodes))

    settings = sampling_of(call.sampling, b, call.target.vocab)
    bad_value = settings.bad
    if READS_DRAFT:
        bad_draft_value = sampling_of(call.draft_sampling, b, call.draft.vocab).bad
        has_candidates = any_of((parent == 0) & (ids >= 0))
        bad_value = bad_value | (bad_draft_value & (settings.greedy == 0) & has_candidates & active)
    status = tl.where(bad & active, S_LAYOUT, 0)
    if RULE != GREEDY:
        status = tl.where(bad_value, status | S_SAMPLING, status)
    plan_draw(call, b, 0, 0, NOTHING, status, 0)
    tl.store(call.num_accepted + b, 0)  # results of a request that does not walk
    tl.store(call.status + b, status)
    width = size_of(call.max_depth) + 1
    for start in range(0, width, NP):
        mask = start + n < width
        tl.store(call.token_ids + b * width + start + n, n * 0 - 1, mask=mask)
        tl.store(call.path + b * width + start + n, n * 0 - 1, mask=mask)
        if call.logprobs is not None:
            tl.store(call.logprobs + b * width + start + n, n.to(tl.float32) * 0, mask=mask)


@triton.jit
def node_field(call, table, b, node):
    return tl.load(table + b * size_of(call.nodes) + node)


@triton.jit
def load_nodes(call, table, b, NP: tl.constexpr):
    """A table of all nodes of a request; -1 past the end."""
    n = tl.arange(0, NP)
    return tl.load(table + b * size_of(call.nodes) + n, mask=n < size_of(call.nodes), other=-1)


@triton.jit
def first_of(condition, n):
    """Lowest node that fulfils a condition, NOBODY if none does."""
    return tl.min(tl.where(condition, n, NOBODY), axis=0)


@triton.jit
def node_coins(call, b, depth, rank):
    """Coins of the nodes of some depth (of root 0) and rank; those of siblings in turn, or of a parent's children."""
    return coins(call.noise, b, tl.load(call.noise.position + b) + depth, rank)


@triton.jit
def draws_from_rows(call, b, ROWS: tl.constexpr):
    """(the request is greedy, its drafts have laws): a greedy target never looks at the draft row."""
    settings = sampling_of(call.sampling, b, call.target.vocab)
    has_row = b < 0
    if ROWS:
        draft_greedy = sampling_of(call.draft_sampling, b, call.draft.vocab).greedy
        has_row = (settings.greedy == 0) & (draft_greedy == 0)
    return settings.inv_t, settings.greedy, has_row


@triton.jit
def candidates_at(
    call, b, node, row, draft_row, ids, tested, inv_t, greedy, has_row, RULE: tl.constexpr, ROWS: tl.constexpr
):
    """(p, q, unreadable) of candidates under the rows of `node`; blocks, but row numbers may be scalars."""
    node = ids * 0 + node
    x = target_logits_at(call, b, b * 0, node, ids, tested)
    p = prob(x, law_of(call.ws, tl.where(tested, row, -1)), inv_t)
    if RULE != GREEDY:
        argmax = get_record_i(call.ws, row + ids * 0, Q_ARG, tested)
        p = tl.where(greedy, (tested & (ids == argmax)).to(tl.float32), p)
    q, unreadable = draft_at(call, b, b * 0, node, ids, tested, has_row, draft_row + ids * 0, ROWS, False)
    return p, q, unreadable


@triton.jit
def list_nodes(call, b, n, ids, weight, chosen):
    """List the ids of the chosen nodes with their weights; returns how many."""
    place = b * size_of(call.nodes) + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # who still reads the list before
    tl.store(call.listed + place, ids, mask=chosen)
    tl.store(call.listed_weight + place, weight, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def with_listed(call, b, v, weight, q, count):
    """(weights with those of the listed ids in their place, q without them)."""
    for i in range(0, count):
        hit = v == tl.load(call.listed + b * size_of(call.nodes) + i)
        weight = tl.where(hit, tl.load(call.listed_weight + b * size_of(call.nodes) + i), weight)
        q = tl.where(hit, 0.0, q)
    return weight, q


@triton.jit
def _row_masses(
    call, b, node, row, draft_row, inv_t, has_row, a, scale, count, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """`masses` of all ids."""
    HALF: tl.constexpr = TILE // 2
    mass, left = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for start in range(0, call.target.vocab, HALF):
        tile = start // HALF
        _, p = target_probs(call, b, node, b * 0, row, tile, inv_t, b < 0, HALF)
        q = p * 0
        if ROWS:
            if has_row:
                _, q = draft_probs(call, b, node, b * 0, tile, law_of(call.ws, draft_row), HALF)
        weight, q = with_listed(call, b, start + tl.arange(0, HALF), tl.maximum(a * p - scale * q, 0.0), q, count)
        mass += tl.sum(weight, axis=0)
        left += tl.sum(q, axis=0)
    return mass, left


@triton.jit
def masses(
    call, b, node, row, draft_row, inv_t, has_row, a, scale, count, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """(sum of (a p - scale q)+ with the listed weights in their place, sum of q without them), by one program."""
    if call.columns.kept is not None:
        mass, left = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
        if has_row:
            at = b * size_of(call.nodes)
            listed, weights = call.listed + at, call.listed_weight + at
            mass, left = kept_masses(call, b, node, b * 0, row, draft_row, inv_t, a, scale, listed, weights, count)
        else:
            mass, left = _row_masses(call, b, node, row, draft_row, inv_t, has_row, a, scale, count, False, TILE)
        return mass, left
    else:
        return _row_masses(call, b, node, row, draft_row, inv_t, has_row, a, scale, count, ROWS, TILE)


@triton.jit
def emit(call, b, column, token, node):
    """A token of the result and, -1 if it was drawn, its node."""
    at = b * (size_of(call.max_depth) + 1) + column
    tl.store(call.token_ids + at, token)
    tl.store(call.path + at, node)


@triton.jit
def emit_logprob(call, b, column, token, above, row, ROW_RULE: tl.constexpr, LOGPROBS: tl.constexpr):
    """Log-probability of an emitted token under the row of the node above it."""
    if LOGPROBS != NO_LOGPROBS:
        value = logprob_at(call, b, b * 0, above, token, token >= 0, row, ROW_RULE, LOGPROBS)
        tl.store(call.logprobs + b * (size_of(call.max_depth) + 1) + column, value)


@triton.jit
def is_bad(call, row):
    return get_record_i(call.ws, row, Q_STATE, row >= 0) == BAD


@triton.jit
def end_walk(
    call, b, node, row, slot, how, token, status, count, ROW_RULE: tl.constexpr, LOGPROBS: tl.constexpr
):  # fmt: skip
    """The walk ends at a node: the token after it is known, or a draw is set up."""
    depth = node_field(call, call.depth, b, node)
    bad = is_bad(call, row)
    how = tl.where(bad, NOTHING, how)
    status = tl.where(bad, status | S_TARGET, status)
    tl.store(call.num_accepted + b, depth)
    tl.store(call.status + b, status)
    if how == FIXED:
        emit(call, b, depth, token, -1)
        emit_logprob(call, b, depth, token, node, row, ROW_RULE, LOGPROBS)
    plan_draw(call, b, node, slot, how, status, count)


@triton.jit
def plan_draw(call, b, node, slot, how, status, count):
    at = call.walk + b * W_FIELDS
    tl.store(at + W_STATUS, status)
    tl.store(at + W_HOW, how)
    tl.store(at + W_NODE, node)
    tl.store(at + W_SLOT, slot)
    tl.store(at + W_LISTED, count)
