# ruff: noqa: SIM102 - `if` on a constexpr prunes code
"""verify_tree in Triton: check the tree; for each level of it digest and settle the queued rows, then walk and draw.

Rule typical reads several nodes a level, traversal all of them at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.chains import Chain, number_of, row_offset
from ..._triton.codes import PROCESSED_LOGPROBS, RAW_LOGPROBS, RESIDUAL_PURPOSE, TARGET_PURPOSE
from ..._triton.emit import draw_next
from ..._triton.laws import law_of
from ..._triton.look import digest_rows, look, on_table
from ..._triton.rows import sampling_of, size_of
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
    emit,
    emit_logprob,
    node_field,
    open_kernel,
    plan_queue,
)  # fmt: skip
from ..._triton.trees import padded
from ..._triton.visit import Rest
from ..._triton.walk import FIXED, MATCH, NOTHING, RATIO, RESIDUAL, Knobs
from ..._triton.walk import GREEDY as GREEDY_ROW
from ..._triton.walk import TYPICAL as TYPICAL_ROW
from ..._types import Sampling, TreeArguments

FRONTIER = 8  # nodes that a level of rule typical reads


@triton.jit
def _draw(
    call, b, NT, NR, RULE: tl.constexpr, ROW_RULE: tl.constexpr, ROWS: tl.constexpr, LOGPROBS: tl.constexpr,
    TILE: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Token = argmax_v log(weight(v)) - log E(v), weight = p, or (a p - b q)+ with the listed ids' own weights."""
    task = call.walk + b * W_FIELDS
    how, node = tl.load(task + W_HOW), tl.load(task + W_NODE)
    if (how != NOTHING) & (how != FIXED):
        slot, count = tl.load(task + W_SLOT), tl.load(task + W_LISTED)
        row = b * NR + slot
        inv_t = sampling_of(call.sampling, b, call.target.vocab).inv_t
        rest = Rest()
        if ROWS:
            draft_inv_t = sampling_of(call.draft_sampling, b, call.draft.vocab).inv_t
            offset = row_offset(call.draft, call.chain, b * 0, b, node, 0)
            number = number_of(call.chain, b * 0, b, node)
            law = law_of(call.ws, tl.where(how == RESIDUAL, row + NT, -1))
            a, scale = tl.load(call.scale + b * 2), tl.load(call.scale + b * 2 + 1)
            rest = Rest(call.draft, call.columns, offset, number, law, draft_inv_t, a, scale)
        at = b * size_of(call.nodes)
        token, status = draw_next(
            call, b, row, how, tl.load(task + W_STATUS), tl.full([], -1, tl.int32), inv_t, rest, b < 0,
            call.listed + at, count, call.listed_weight + at, ROWS, TILE, NP,
        )  # fmt: skip
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


@host.entry
def _decide_kernel(
    call, NT, ND, RULE: tl.constexpr, ROW_RULE: tl.constexpr, REPLACEMENT: tl.constexpr, ROWS: tl.constexpr,
    LOGPROBS: tl.constexpr, DRAWS: tl.constexpr, TILE: tl.constexpr, NP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """What the rows just read decide: the next nodes, or the end of the walk and its draw. Grid: batch."""
    call = Walk(*call)
    b = tl.program_id(0).to(tl.int64)
    NR = NT + ND
    walks = tl.load(call.queue + b * NT) >= 0
    if RULE == TRAVERSAL:
        if walks:
            traverse(call, b, NT, NR, LOGPROBS, ROWS, TILE, NP)
    elif RULE == TYPICAL:
        walk_typical(call, b, NT, NR, ROW_RULE, LOGPROBS, NP)
    else:
        walk_on(call, b, NT, NR, RULE, ROW_RULE, REPLACEMENT, ROWS, LOGPROBS, TILE, NP)
    tl.debug_barrier()  # what the walk left in memory is read here
    if DRAWS:
        if walks:
            _draw(call, b, NT, NR, RULE, ROW_RULE, ROWS, LOGPROBS, TILE, NP)
            tl.debug_barrier()
    if RULE != TRAVERSAL:
        plan_queue(call, b, NT, ND, ROWS, SLOTS)


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
    given: TreeArguments, out_ids: Tensor, path: Tensor, num_accepted: Tensor, status: Tensor, logprobs: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.verify_tree`."""
    token_ids, target_logits, draft_logits, rule = given.token_ids, given.target_logits, given.draft_logits, given.rule
    max_depth, logprobs_mode = given.max_depth, given.logprobs_mode
    (batch, nodes), device, vocab = token_ids.shape, token_ids.device, target_logits.shape[-1]
    if batch == 0:
        return
    reads_draft = draft_logits is not None and rule in (RECURSIVE.value, GREEDY_MULTI_DRAFT.value, TRAVERSAL.value)
    has_rows = reads_draft and draft_logits is not None and draft_logits.shape[-1] > 0
    draft = draft_logits if draft_logits is not None and has_rows else target_logits
    at_once, is_typical = rule == TRAVERSAL.value, rule == TYPICAL.value
    nt = nodes if at_once else min(nodes, FRONTIER) if is_typical else 1
    nd = nt if has_rows else 0
    row_rule = {0: MATCH.value, GREEDY.value: GREEDY_ROW.value, TYPICAL.value: TYPICAL_ROW.value}.get(rule, RATIO.value)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    sampling, draft_sampling = given.sampling, given.draft_sampling
    if rule == GREEDY.value:  # reads no sampling parameter
        sampling = Sampling(active=sampling.active)
    target_rows = scratch.rows_of(target_logits, allowed=given.allowed, edits=given.edits)
    draft_rows = scratch.rows_of(draft, edits=given.draft_edits if has_rows else None)
    on = on_table(look(batch, target_rows, draft_rows if has_rows else None, sampling, draft_sampling, nt, nd))
    noise, marks = scratch.noise_of(given.rng), None
    if is_typical:
        score = floats(batch, nodes, dtype=torch.float64)
        marks = Marks(ints(batch, nodes), score, floats(batch, nodes), ints(batch, nodes), floats(batch, nodes))
    columns = scratch.columns(given.token_map, vocab, given.draft_kept) if has_rows else scratch.columns(None, vocab)
    parent, depth, rank, ids, children = (ints(batch, nodes) for _ in range(5))
    knobs = Knobs(0.0, None, scratch.typical_of(given.typical, is_typical, device), 0, 0, 0)
    call = Walk(
        Chain(ids, None, 0, host.size(nodes - 1), on.sampling),
        target_rows, draft_rows, columns, on.sampling,
        on.draft_sampling, noise, knobs, on.digest, on.plan,
        host.size(nodes), host.size(max_depth),
        parent, depth, rank, ids, children, ints(batch, nt), ints(batch, nt), ints(batch, W_FIELDS.value),
        floats(batch, 2), ints(batch, nodes), floats(batch, nodes), marks,
        out_ids, path, num_accepted, status, logprobs if logprobs_mode else None,
    )  # fmt: skip
    flags: dict[str, Any] = {"RULE": rule, "REPLACEMENT": given.replacement, "ROWS": has_rows, "NP": padded(nodes)}
    host.launch(
        open_kernel, batch, call, token_ids, given.parents, nt, nd, READS_DRAFT=reads_draft, seen=on.seen, **flags,
    )  # fmt: skip
    races = {MATCH.value: TARGET_PURPOSE.value, TYPICAL_ROW.value: RESIDUAL_PURPOSE.value}
    draws = rule in (RECURSIVE.value, GREEDY_MULTI_DRAFT.value, TARGET_ONLY.value, TRAVERSAL.value)
    mass = row_rule == RATIO.value or is_typical or logprobs_mode == PROCESSED_LOGPROBS.value or on.work is not None
    # Half the threads of launch_alone: recursive spills at 128 registers a thread, and needs 190 to 200.
    decide = [
        host.Launches(on.seen).add(
            _decide_kernel, batch, walk, nt, nd, ROW_RULE=row_rule, LOGPROBS=logprobs_mode, DRAWS=draws,
            TILE=host.TILE, SLOTS=host.power(nt), registers=255, **flags,
        )
        for walk in (call, call._replace(queue=call.following, following=call.queue))
    ]  # fmt: skip
    read = digest_rows(
        on, noise, purpose=races.get(row_rule, -1), mass=mass, entropy=is_typical,
        raw=logprobs_mode == RAW_LOGPROBS.value, columns=columns,
    )  # fmt: skip
    decide[0]()
    for level in range(1, _levels(rule, nodes, max_depth)):
        read()
        decide[level % 2]()
