"""allocate_drafts in Triton: products, the rank of each among all of them, and how many of the ranks are kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.codes import S_DRAFT, S_ID

REQUESTS = 128  # of a program that multiplies
ITEMS, OTHERS = 64, 128  # of a program that ranks, and those it compares them with at once
BLOCK = 1024  # ranks, or requests, that the last kernel takes at once
ONE = tl.constexpr(4294967296.0)  # a token, where expected tokens are summed as integers: no order changes a bit


@triton.jit
def _is_running(active, b, batch):
    """Whether these requests exist and take part; `active` may be a null pointer."""
    return (b < batch) & (tl.load(active + b, mask=(b < batch) & (active.to(tl.int64) != 0), other=1) != 0)


@host.entry
def _products_kernel(
    ids, confidence, active, products, ranked, status, batch, draft, capacity, REQUESTS: tl.constexpr
):  # fmt: skip
    """products[i, b] = c[b, 0] ... c[b, i], 0 from the end of the draft on. Grid: tiles of requests."""
    b = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    runs = _is_running(active, b, batch)
    going, product, fault = runs, tl.where(runs, 1.0, 0.0), tl.zeros([REQUESTS], tl.int32)
    for i in range(draft):
        token = tl.load(ids + b * draft + i, mask=runs, other=-1)
        c = tl.load(confidence + b * draft + i, mask=runs, other=0.0)
        is_good = (c >= 0.0) & (c <= 1.0)
        found = tl.where(token < -1, S_ID, tl.where((token >= 0) & (is_good == 0), S_DRAFT, 0))
        fault = tl.where(going, found, fault)
        going = going & (token >= 0) & is_good
        product = tl.where(going, product * c, 0.0)
        tl.store(products + i * batch.to(tl.int64) + b, product, mask=b < batch)
    tl.store(status + b, fault, mask=b < batch)
    for start in range(tl.program_id(0) * REQUESTS, capacity, tl.num_programs(0) * REQUESTS):
        n = start + tl.arange(0, REQUESTS)
        tl.store(ranked + n, tl.zeros([REQUESTS], tl.float32), mask=n < capacity)


@host.entry
def _rank_kernel(products, ranks, ranked, total, capacity, ITEMS: tl.constexpr, OTHERS: tl.constexpr):
    """How many drafts come before each; ranked: the products in that order. Grid: tiles of drafts.

    Drafts lie depth by depth, so the earlier of two equal ones is the shallower, then the lower request.
    """
    mine = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    product = tl.load(products + mine, mask=mine < total, other=0.0)
    before = tl.zeros([ITEMS], tl.int32)
    for start in range(0, tl.where(tl.max(product, axis=0) > 0.0, total, 0), OTHERS):
        other = start + tl.arange(0, OTHERS)
        theirs = tl.load(products + other, mask=other < total, other=-1.0)[None, :]
        is_before = (theirs > product[:, None]) | ((theirs == product[:, None]) & (other[None, :] < mine[:, None]))
        before += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(ranks + mine, tl.where(product > 0.0, before, capacity), mask=mine < total)
    tl.store(ranked + before, product, mask=(product > 0.0) & (before < capacity))


@triton.jit
def _yield_of(tokens, cost):
    """Tokens a unit of time; least where the cost is not positive."""
    is_priced = cost > 0.0
    return tl.where(is_priced, tokens.to(tl.float64) / tl.where(is_priced, cost, 1.0).to(tl.float64), float("-inf"))


@triton.jit
def _count_kept(ranked, cost, tokens, capacity, compare_all, BLOCK: tl.constexpr):
    """How many of the best drafts pay, if `tokens` come without any."""
    has_cost = cost.to(tl.int64) != 0
    best = _yield_of(tokens, tl.load(cost, mask=has_cost, other=1.0))
    kept, start, going = 0, 0, capacity
    while going > 0:
        n = start + tl.arange(0, BLOCK)
        product = tl.load(ranked + n, mask=n < capacity, other=0.0)
        more = (product * ONE).to(tl.int64)
        after = tokens + tl.cumsum(more, axis=0)
        is_known = has_cost & (n < capacity)
        value = _yield_of(after, tl.load(cost + n + 1, mask=is_known, other=0.0))
        value_before = _yield_of(after - more, tl.load(cost + n, mask=is_known, other=0.0))
        is_paying = product > 0.0
        rises = is_paying & ((value > value_before) | (has_cost == 0))
        value = tl.where(is_paying, value, float("-inf"))
        largest = tl.max(value, axis=0)
        if compare_all:
            is_better = largest > best
            kept = tl.where(is_better, tl.min(tl.where(value == largest, n + 1, start + BLOCK), axis=0), kept)
            best = tl.where(is_better, largest, best)
            going = tl.min(is_paying.to(tl.int32), axis=0)
        else:
            run = tl.min(tl.where(rises, BLOCK, n - start), axis=0)
            kept += run
            going = (run == BLOCK).to(tl.int32)
        tokens += tl.sum(more, axis=0)
        start += BLOCK
    return kept


@host.entry
def _allot_kernel(
    ids, active, cost, ranks, ranked, out_ids, cu_draft, source, num_draft, status, batch, draft, capacity,
    compare_all, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the drafts whose rank is among those that pay, request after request. Grid: 1."""
    lane = tl.arange(0, BLOCK)
    running = 0
    for start in range(0, batch, BLOCK):
        running += tl.sum(_is_running(active, start + lane, batch).to(tl.int32), axis=0)
    tokens = (tl.cast(running, tl.float32) * ONE).to(tl.int64)
    kept = _count_kept(ranked, cost, tokens, capacity, compare_all, BLOCK)
    at = 0
    tl.store(cu_draft, 0)
    for start in range(0, batch, BLOCK):
        b = start + lane.to(tl.int64)
        count, i, going = tl.zeros([BLOCK], tl.int32), 0, draft
        while going > 0:
            is_kept = tl.load(ranks + i * batch.to(tl.int64) + b, mask=b < batch, other=capacity) < kept
            count += is_kept.to(tl.int32)
            i += 1
            going = tl.where(i < draft, tl.max(is_kept.to(tl.int32), axis=0), 0)
        end = at + tl.cumsum(count, axis=0)
        tl.store(num_draft + b, count, mask=b < batch)
        tl.store(cu_draft + 1 + b, end, mask=b < batch)
        for j in range(tl.max(count, axis=0)):
            token = tl.load(ids + b * draft + j, mask=j < count)
            tl.store(out_ids + end - count + j, token, mask=j < count)
            tl.store(source + end - count + j, (b * draft + j).to(tl.int32), mask=j < count)
        at += tl.sum(count, axis=0)
    for start in range(at, capacity, BLOCK):
        n = start + lane
        tl.store(out_ids + n, tl.full([BLOCK], -1, tl.int32), mask=n < capacity)
        tl.store(source + n, tl.full([BLOCK], -1, tl.int32), mask=n < capacity)


def allocate_drafts_out(
    draft_ids: Tensor, confidence: Tensor, active: Tensor | None, cost: Tensor | None, budget: int, compare_all: bool,
    out_ids: Tensor, cu_draft: Tensor, source: Tensor, num_draft: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.allocate_drafts`."""
    batch, draft = draft_ids.shape
    total, capacity, device = batch * draft, len(out_ids), draft_ids.device
    active = scratch.given_or_null(active, torch.bool, device)
    cost = scratch.given_or_null(cost, torch.float32, device)
    products, ranked = (torch.empty(n, dtype=torch.float32, device=device) for n in (total, capacity))
    ranks = torch.empty(total, dtype=torch.int32, device=device)
    host.launch(
        _products_kernel, triton.cdiv(batch, REQUESTS), draft_ids, confidence, active, products, ranked, status,
        batch, draft, capacity, REQUESTS=REQUESTS, num_warps=4,
    )  # fmt: skip
    host.launch(
        _rank_kernel, triton.cdiv(total, ITEMS), products, ranks, ranked, total, capacity,
        ITEMS=ITEMS, OTHERS=OTHERS, num_warps=4,
    )  # fmt: skip
    host.launch(
        _allot_kernel, 1, draft_ids, active, cost, ranks, ranked, out_ids, cu_draft, source, num_draft, status,
        batch, draft, capacity, int(compare_all), BLOCK=BLOCK,
    )  # fmt: skip
