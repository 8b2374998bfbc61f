# ruff: noqa: SIM102 - `if` on a constexpr prunes code
"""verify_tree in Triton: check the tree, one launch a level of it, one draw.

A level reads the rows of the nodes in the queue, a tile a program; the last program of a request tries the children
and queues what it accepts. Filters add a launch a level for thresholds that lie below the lists, rule
greedy_multi_draft one for the draw that may go on. Rule typical reads several nodes a level, traversal all in one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.chain_rows import merge_target, target_again, target_tile
from ..._triton.chains import Chain, row_offset
from ..._triton.codes import RESIDUAL_PURPOSE, S_EMPTY
from ..._triton.handshake import arrive
from ..._triton.laws import kept, law_of
from ..._triton.noise import log, tile_noise
from ..._triton.pairs import draft_probs, law_again, law_row, law_tile, target_probs
from ..._triton.race import race_scores, winner
from ..._triton.rows import Noise, Sampling, sampling_of
from ..._triton.stats import (
    F_MAX,
    F_SCORE,
    F_SUM,
    I_ARG,
    I_RANK,
    I_WINNER,
    OPEN,
    Q_ARG,
    Q_STATE,
    get_f,
    get_i,
    get_record_i,
    put_f,
    put_i,
)  # fmt: skip
from ..._triton.traversal import traverse
from ..._triton.tree_rules import Marks, descends, walk_on, walk_typical
from ..._triton.tree_walk import (
    GREEDY,
    GREEDY_MULTI_DRAFT,
    NOBODY,
    RECURSIVE,
    TARGET_ONLY,
    TRAVERSAL,
    TYPICAL,
    W_DESCENDS,
    W_FIELDS,
    W_HOW,
    W_LISTED,
    W_NODE,
    W_SLOT,
    W_STATUS,
    Walk,
    draws_from_rows,
    emit,
    emit_logprob,
    node_field,
    open_kernel,
    with_listed,
)  # fmt: skip
from ..._triton.trees import padded
from ..._triton.walk import GREEDY as GREEDY_ROW
from ..._triton.walk import MATCH, NOTHING, POINT, RATIO, RESIDUAL, Knobs
from ..._triton.walk import TYPICAL as TYPICAL_ROW

FRONTIER = 8  # nodes that a level of rule typical reads


@triton.jit
def _decide(
    call, b, NT, NR, RULE: tl.constexpr, ROW_RULE: tl.constexpr, REPLACEMENT: tl.constexpr, ROWS: tl.constexpr,
    LOGPROBS: tl.constexpr, TILE: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """What the rows just read decide, by the program that came last."""
    if RULE == TRAVERSAL:
        traverse(call, b, NT, NR, LOGPROBS, ROWS, TILE, NP)
    elif RULE == TYPICAL:
        walk_typical(call, b, NT, NR, ROW_RULE, LOGPROBS, NP)
    else:
        walk_on(call, b, NT, NR, RULE, ROW_RULE, REPLACEMENT, ROWS, LOGPROBS, TILE, NP)


@triton.jit
def _slot_of(call, NT, ND, ROWS: tl.constexpr):
    """(tile, row, request, node, whether it is a target row, whether it is read) of a program."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // call.ws.tiles
    b = row // (NT + ND)
    slot = (row % (NT + ND)).to(tl.int32)
    is_target = slot < NT
    node = tl.load(call.queue + b * NT + tl.where(is_target, slot, slot - NT))
    used = node >= 0
    if ROWS:
        if is_target == 0:
            _, _, has_row = draws_from_rows(call, b, ROWS)
            used = used & has_row & (node_field(call, call.children, b, tl.maximum(node, 0)) > 0)
    return (pid % call.ws.tiles).to(tl.int32), row, b, node, is_target, used


@triton.jit
def _level_kernel(
    call, NT, ND, tickets_b, RULE: tl.constexpr, ROW_RULE: tl.constexpr, REPLACEMENT: tl.constexpr,
    ROWS: tl.constexpr, LOGPROBS: tl.constexpr, FILTERS: tl.constexpr, DRAFT_FILTERS: tl.constexpr,
    LISTED: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Row statistics of the queued nodes, as `rows_kernel` makes them for a chain; then the walk.

    Grid: batch * (NT target + ND draft rows) * tiles; a program owns one tile of one row.
    """
    tile, row, b, node, is_target, used = _slot_of(call, NT, ND, ROWS)
    row_done = tile == 0
    if used:
        if is_target:
            inv_t = tl.full([], 1.0, tl.float32)
            greedy, filtered = b < 0, b < 0
            if RULE != GREEDY:
                inv_t, _, _, _, _, filtered, greedy, _ = sampling_of(call.sampling, b, call.target.vocab)
            place = node_field(call, call.depth, b, node)
            target_tile(
                call, b, node, place, row, tile, None, b * 0, inv_t, greedy, TILE, 1, ROW_RULE, filtered, LOGPROBS,
                FILTERS, LISTED,
            )  # fmt: skip
            row_done = arrive(call.ws.tickets + row, call.ws.tiles)
            if row_done:
                merge_target(
                    call, b, place, row, inv_t, greedy, filtered, ROW_RULE, LOGPROBS, FILTERS, TILE, T_PAD, LISTED
                )
        else:
            if ROWS:
                inv_t, _, _, _, _, filtered, _, _ = sampling_of(call.draft_sampling, b, call.draft.vocab)
                offset = row_offset(call.draft, call.chain, b * 0, b, node, 0)
                law_tile(
                    call.ws, call.draft_lists, call.draft, offset, b, row, tile, inv_t, filtered,
                    DRAFT_FILTERS, TILE, LISTED,
                )  # fmt: skip
                row_done = arrive(call.ws.tickets + row, call.ws.tiles)
                if row_done:
                    law_row(
                        call.ws, call.draft_lists, call.draft, row, call.draft_sampling, b, b < 0,
                        DRAFT_FILTERS, TILE, T_PAD, LISTED,
                    )  # fmt: skip
    if row_done and not (FILTERS or DRAFT_FILTERS):
        if arrive(call.ws.tickets + tickets_b + b, NT + ND):
            _decide(call, b, NT, NT + ND, RULE, ROW_RULE, REPLACEMENT, ROWS, LOGPROBS, TILE, NP)


@triton.jit
def _again_kernel(
    call, NT, ND, tickets_b, RULE: tl.constexpr, ROW_RULE: tl.constexpr, REPLACEMENT: tl.constexpr,
    ROWS: tl.constexpr, LOGPROBS: tl.constexpr, FILTERS: tl.constexpr, DRAFT_FILTERS: tl.constexpr,
    GATHERED: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Rows whose threshold lies below their lists are read once more; then the walk. Grid: as `_level_kernel`."""
    tile, row, b, node, is_target, used = _slot_of(call, NT, ND, ROWS)
    row_done = tile == 0
    if used:
        if get_record_i(call.ws, row, Q_STATE, used) == OPEN:
            if is_target:
                if FILTERS:
                    place = node_field(call, call.depth, b, node)
                    row_done = target_again(call, b, node, place, row, b * 0, tile, ROW_RULE, TILE, T_PAD, GATHERED)
            else:
                if DRAFT_FILTERS:
                    offset = row_offset(call.draft, call.chain, b * 0, b, node, 0)
                    row_done = law_again(
                        call.ws, call.draft_lists, call.draft, offset, b, row, tile, call.draft_sampling, b,
                        TILE, GATHERED,
                    )  # fmt: skip
    if row_done:
        if arrive(call.ws.tickets + tickets_b + b, NT + ND):
            _decide(call, b, NT, NT + ND, RULE, ROW_RULE, REPLACEMENT, ROWS, LOGPROBS, TILE, NP)


@triton.jit
def _draw_tile(
    call, b, part, tile, node, slot, how, count, NT, NR, inv_t, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Both races of one tile: the plain row (what an empty residual falls back to) and what is left of it."""
    v = tile * TILE + tl.arange(0, TILE)
    place = tl.load(call.noise.position + b) + node_field(call, call.depth, b, node)
    neg_log_e = tile_noise(call.noise, b, place, RESIDUAL_PURPOSE, tile * TILE, TILE)
    row = b * NR + slot
    x, p = target_probs(call, b, node, b * 0, row, tile, inv_t, b < 0, TILE)
    competes = kept(x, law_of(call.ws, row)[3])
    score = race_scores(x * inv_t, competes, neg_log_e)
    best, at = winner(score, v)
    put_f(part, F_SCORE, b, tile, best)
    put_i(part, I_WINNER, b, tile, at)
    if how == RESIDUAL:
        if ROWS:
            _, q = draft_probs(call, b, node, b * 0, row + NT, tile, law_of(call.ws, row + NT), TILE)
            weight = tl.load(call.scale + b * 2) * p - tl.load(call.scale + b * 2 + 1) * q
            weight, _ = with_listed(call, b, v, weight, q, count)
            competes = weight >= 1.1754943508222875e-38
            best, at = winner(race_scores(log(tl.where(competes, weight, 1.0)), competes, neg_log_e), v)
            put_f(part, F_SUM, b, tile, best)
            put_i(part, I_RANK, b, tile, at)
    if how == POINT:
        weight, _ = with_listed(call, b, v, p * 0 + 1.0, p, count)
        best, at = winner(tl.where(weight > 0, score, float("-inf")), v)
        put_f(part, F_SUM, b, tile, best)
        put_i(part, I_RANK, b, tile, at)
        # The largest logit that is not listed: the winner where every score overflows.
        best, at = winner(tl.where(competes & (weight > 0), x, float("-inf")), v)
        put_f(part, F_MAX, b, tile, best)
        put_i(part, I_ARG, b, tile, at)


@triton.jit
def _draw_kernel(
    call, part, NT, ND, RULE: tl.constexpr, ROW_RULE: tl.constexpr, ROWS: tl.constexpr, LOGPROBS: tl.constexpr,
    TILE: tl.constexpr, T_PAD: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Token = argmax_v log(weight(v)) - log E(v), weight = p, or (a p - b q)+ with the listed ids' own weights.

    Grid: batch * tiles; a program owns one tile of the row where the walk ended. The last one writes the token.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % part.tiles).to(tl.int32)
    b = pid // part.tiles
    task = call.walk + b * W_FIELDS
    how, node, slot, count = (
        tl.load(task + W_HOW),
        tl.load(task + W_NODE),
        tl.load(task + W_SLOT),
        tl.load(task + W_LISTED),
    )
    if how != NOTHING:
        inv_t, _, _, _, _, _, _, _ = sampling_of(call.sampling, b, call.target.vocab)
        row = b * (NT + ND) + slot
        _draw_tile(call, b, part, tile, node, slot, how, count, NT, NT + ND, inv_t, ROWS, TILE)
        if arrive(part.tickets + b, part.tiles):
            best, token = winner(get_f(part, F_SCORE, b, T_PAD, float("-inf")), get_i(part, I_WINNER, b, T_PAD, NOBODY))
            token = tl.where(best > float("-inf"), token, get_record_i(call.ws, row, Q_ARG, b >= 0))
            status = tl.load(task + W_STATUS)
            if (how == RESIDUAL) | (how == POINT):
                best, other = winner(get_f(part, F_SUM, b, T_PAD, float("-inf")), get_i(part, I_RANK, b, T_PAD, NOBODY))
                if how == POINT:
                    rest, rest_at = winner(
                        get_f(part, F_MAX, b, T_PAD, float("-inf")), get_i(part, I_ARG, b, T_PAD, NOBODY)
                    )
                    other = tl.where(best > float("-inf"), other, rest_at)
                    best = tl.maximum(best, rest)
                status |= tl.where(best > float("-inf"), 0, S_EMPTY)
                token = tl.where(best > float("-inf"), other, token)
            child = tl.full([], NOBODY, tl.int32)
            if RULE == GREEDY_MULTI_DRAFT:
                if tl.load(task + W_DESCENDS) > 0:
                    child = descends(call, b, node, token, NP)
            depth = node_field(call, call.depth, b, node)
            emit(call, b, depth, token, tl.where(child < NOBODY, child, -1))
            emit_logprob(call, b, depth, token, node, row, ROW_RULE, LOGPROBS)
            tl.store(call.status + b, status)
            tl.store(task + W_STATUS, status)
            if child < NOBODY:
                tl.store(call.following + b, child)


def _levels(rule: int, nodes: int, max_depth: int) -> int:
    """Launches that the deepest walk needs.

    A level of rule typical that does not fill its rows empties the queue, so that only deeper nodes are left; the last
    one reads the row of a leaf.
    """
    depth = min(max_depth, nodes - 1)
    if rule == TRAVERSAL.value:
        return 1
    return depth + nodes // FRONTIER + 2 if rule == TYPICAL.value else depth + 1


def verify_tree_out(
    token_ids: Tensor, parents: Tensor, target_logits: Tensor, draft_logits: Tensor | None, max_depth: int,
    temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    draft_temperature: Tensor | None, draft_top_k: Tensor | None, draft_top_p: Tensor | None,
    draft_min_p: Tensor | None, seed: Tensor, position: Tensor, step: Tensor | None, rule: int, replacement: bool,
    token_map: Tensor | None, allowed: Tensor | None, typical_epsilon: float, typical_delta: float, logprobs_mode: int,
    out_ids: Tensor, path: Tensor, num_accepted: Tensor, status: Tensor, logprobs: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.verify_tree`."""
    (batch, nodes), device, vocab = token_ids.shape, parents.device, target_logits.shape[-1]
    if batch == 0:
        return
    reads_draft = draft_logits is not None and rule in (RECURSIVE.value, GREEDY_MULTI_DRAFT.value, TRAVERSAL.value)
    has_rows = reads_draft and draft_logits is not None and draft_logits.shape[-1] > 0
    draft = draft_logits if draft_logits is not None and has_rows else target_logits
    at_once, is_typical = rule == TRAVERSAL.value, rule == TYPICAL.value
    nt = nodes if at_once else min(nodes, FRONTIER) if is_typical else 1
    nd = nt if has_rows else 0
    rows, tiles = batch * (nt + nd), max(host.tiles_of(vocab), host.tiles_of(draft.shape[-1]))
    row_rule = {0: MATCH.value, GREEDY.value: GREEDY_ROW.value, TYPICAL.value: TYPICAL_ROW.value}.get(rule, RATIO.value)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tickets = host.counters(rows + batch, device)
    filters = () if rule == GREEDY.value else (top_k, top_p, min_p)
    draft_filters = (draft_top_k, draft_top_p, draft_min_p) if has_rows else ()
    lists = scratch.lists(target_logits, rows, tiles, filters, races=row_rule > 1)
    draft_lists = scratch.lists(draft, rows, tiles, draft_filters)
    marks = None
    if is_typical:
        score = floats(batch, nodes, dtype=torch.float64)
        marks = Marks(ints(batch, nodes), score, floats(batch, nodes), ints(batch, nodes), floats(batch, nodes))
    parent, depth, rank, ids, children = (ints(batch, nodes) for _ in range(5))
    call = Walk(
        Chain(token_ids, None, 0, nodes - 1),
        scratch.rows_of(target_logits, allowed=allowed), scratch.rows_of(draft),
        scratch.columns(token_map if has_rows else None, vocab),
        Sampling(temperature, top_k, top_p, min_p),
        Sampling(draft_temperature, draft_top_k, draft_top_p, draft_min_p),
        Noise(seed, position, step, None), Knobs(0.0, typical_epsilon, typical_delta, 0, 0, 0),
        scratch.partials(tickets, rows, tiles), lists, draft_lists, nodes, max_depth, token_ids, parents,
        parent, depth, rank, ids, children, ints(batch, nt), ints(batch, nt), ints(batch, W_FIELDS.value),
        floats(batch, 2), ints(batch, nodes), floats(batch, nodes), marks,
        out_ids, path, num_accepted, status, logprobs if logprobs_mode else None,
    )  # fmt: skip
    np = padded(nodes)
    host.launch(open_kernel, batch, call, nt, RULE=rule, REPLACEMENT=replacement, READS_DRAFT=reads_draft, NP=np)
    flags: dict[str, Any] = {
        "RULE": rule, "ROW_RULE": row_rule, "ROWS": has_rows, "LOGPROBS": logprobs_mode, "TILE": host.TILE,
        "T_PAD": host.power(tiles), "NP": np,
    }  # fmt: skip
    on: dict[str, Any] = {
        "FILTERS": lists is not None,
        "DRAFT_FILTERS": draft_lists is not None,
        "REPLACEMENT": replacement,
    }
    on["num_warps"] = host.MANY_WARPS if at_once else host.NUM_WARPS
    draw_tile = max(host.TILE // 2, 32)
    draw_tiles = max(triton.cdiv(vocab, draw_tile), 1)
    part = scratch.partials(tickets, batch, draw_tiles)
    draws_between = rule == GREEDY_MULTI_DRAFT.value
    draws = rule in (RECURSIVE.value, GREEDY_MULTI_DRAFT.value, TARGET_ONLY.value, TRAVERSAL.value)
    draw_flags = {**flags, "TILE": draw_tile, "T_PAD": host.power(draw_tiles)}
    levels = _levels(rule, nodes, max_depth)
    for level in range(levels):
        host.launch(_level_kernel, rows * tiles, call, nt, nd, rows, LISTED=host.LISTED, **on, **flags)
        if lists is not None or draft_lists is not None:
            host.launch(_again_kernel, rows * tiles, call, nt, nd, rows, GATHERED=host.GATHERED, **on, **flags)
        if draws and (draws_between or level == levels - 1):
            host.launch(_draw_kernel, batch * draw_tiles, call, part, nt, nd, **draw_flags)
        call = call._replace(queue=call.following, following=call.queue)
