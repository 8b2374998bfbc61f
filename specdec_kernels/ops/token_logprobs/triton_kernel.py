"""token_logprobs in Triton: digest and settle the rows, then look into the blocks of 64 ids that can matter."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._edits import RowEdits
from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.chains import Chain
from ..._triton.codes import S_ID, S_SAMPLING, S_TARGET
from ..._triton.digest import Digest
from ..._triton.laws import LOWEST, kept, law_of
from ..._triton.look import digest_rows, look, on_chains
from ..._triton.noise import BLOCK
from ..._triton.plan import row_of
from ..._triton.records import BAD, Q_ARG, Q_STATE, R_MASS, get_record_f, get_record_i
from ..._triton.rows import fact, is_active, key_of, logits_at, sampling_of, value_of
from ..._triton.settle import maxima_of, settle_row
from ..._triton.thresholds import TAKEN, kth_of, lowest_key
from ..._triton.visit import SPAN, View, pick, picked_logits
from ..._types import Sampling

COUNTED, LISTED = tl.constexpr(64), tl.constexpr(32)  # blocks that are looked into at once, to count ids and to list
FULL, EACH = tl.constexpr(512), tl.constexpr(16)  # ids: a longer list is cut; an id is compared with so many at once
CAPACITY = tl.constexpr(512 + 32 * 64)  # ids that one look may leave


class Lists(NamedTuple):
    """What a program lists of its row."""

    blocks: Any  # int32 [rows, SPAN]: the blocks of a span that are looked into
    logits: Any  # float32 [rows, CAPACITY], in the order of ids; None where none are asked for
    ids: Any  # int32 [rows, CAPACITY]


class Scores(NamedTuple):
    """Results."""

    logprobs: Any
    ranks: Any
    top_ids: Any
    top_logprobs: Any
    status: Any


@triton.jit
def _next_above(key):
    """The smallest logit above that of a key."""
    return value_of(key + 1)


@triton.jit
def _count(view, least, picked):
    """How many ids are at least `least`."""
    seen = tl.zeros([COUNTED, BLOCK], tl.int32)
    count = (view.rows.vocab + BLOCK - 1) // BLOCK
    for start in range(0, count, SPAN):
        n = pick(view, start, count, least, picked, SPAN)
        for first in range(0, n, COUNTED):
            x, _ = picked_logits(view, picked, first, n, COUNTED)
            seen += (x >= least).to(tl.int32)
    return tl.sum(tl.sum(seen, axis=1), axis=0)


@triton.jit
def _cut(lists, found, wanted, low, high):
    """Keep the first `wanted` by falling logit, then by id, in the order of ids; the key of the last."""
    tl.debug_barrier()
    last = kth_of(lists.logits, found, wanted, -1, low, high, TAKEN)
    above = tl.full([], 0, tl.int32)
    for start in range(0, found, SPAN):
        at = start + tl.arange(0, SPAN)
        x = tl.load(lists.logits + at, mask=at < found, other=float("-inf"))
        above += tl.sum((key_of(x) > last).to(tl.int32), axis=0)
    left, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, found, SPAN):
        at = start + tl.arange(0, SPAN)
        x = tl.load(lists.logits + at, mask=at < found, other=float("-inf"))
        ids = tl.load(lists.ids + at, mask=at < found, other=0)
        tied = (key_of(x) == last).to(tl.int32)
        stays = (key_of(x) > last) | ((tied > 0) & (ties + tl.cumsum(tied, axis=0) <= wanted - above))
        place = left + tl.cumsum(stays.to(tl.int32), axis=0) - 1
        tl.debug_barrier()  # what is moved has been read
        tl.store(lists.logits + place, x, mask=stays)
        tl.store(lists.ids + place, ids, mask=stays)
        ties += tl.sum(tied, axis=0)
        left += tl.sum(stays.to(tl.int32), axis=0)
    tl.debug_barrier()
    return last


@triton.jit
def _bound(view, count, wanted, top):
    """A logit that `wanted` blocks of the first span reach, and not many more; -inf where it has fewer.

    Their maxima stay in registers: where nothing is filtered this is the only look at them.
    """
    block = tl.arange(0, SPAN)
    key = key_of(tl.load(view.blocks + block, mask=block < count, other=float("-inf")).to(tl.float32))
    low, high = lowest_key().to(tl.int64), top.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reach = tl.sum((key >= middle).to(tl.int32), axis=0)
        low, high = tl.where(reach >= wanted, middle, low), tl.where(reach >= wanted, high, middle - 1)
        high = tl.where((reach >= wanted) & (reach <= wanted + wanted // 4), low, high)
    return value_of(low.to(tl.int32))


@triton.jit
def _list(view, law, wanted, lists):
    """List the first `wanted` kept ids by falling logit, and maybe more, up to FULL; how many there are.

    Blocks come by rising id, so an equal logit that comes later is behind.
    """
    SIZE: tl.constexpr = LISTED * BLOCK
    count = (view.rows.vocab + BLOCK - 1) // BLOCK
    top = key_of(law.maximum)
    least = tl.maximum(tl.maximum(law.threshold, _bound(view, count, wanted, top)), LOWEST)
    found = tl.full([], 0, tl.int32)
    for start in range(0, count, SPAN):
        n = pick(view, start, count, least, lists.blocks, SPAN)
        for first in range(0, n, LISTED):
            x, v = picked_logits(view, lists.blocks, first, n, LISTED)
            x, v = tl.reshape(x, (SIZE,)), tl.reshape(v, (SIZE,))
            on = x >= least
            place = found + tl.cumsum(on.to(tl.int32), axis=0) - 1
            tl.store(lists.logits + place, x, mask=on)
            tl.store(lists.ids + place, v, mask=on)
            found += tl.sum(on.to(tl.int32), axis=0)
            if found > FULL:
                least = _next_above(_cut(lists, found, wanted, key_of(least), top))
                found = tl.minimum(found, wanted)
    return found


@triton.jit
def _write_best(out, lists, b, found, law, inv_t, log_mass, active, top):
    """The first `top` of what is listed, in order."""
    tl.debug_barrier()
    i = tl.arange(0, FULL)
    x = tl.load(lists.logits + i, mask=i < found, other=float("-inf"))
    ids = tl.load(lists.ids + i, mask=i < found, other=-1)
    place = tl.where(i < found, 0, i)
    for start in range(0, found, EACH):
        j = start + tl.arange(0, EACH)
        y = tl.load(lists.logits + j, mask=j < found, other=float("-inf"))
        ahead = (y[None, :] > x[:, None]) | ((y[None, :] == x[:, None]) & (j[None, :] < i[:, None]))
        ahead = ahead & (j[None, :] < found) & (i[:, None] < found)
        place += tl.sum(ahead.to(tl.int32), axis=1)
    logprob = tl.where(i < found, (x - law.maximum) * inv_t - log_mass, tl.where(active, float("-inf"), 0.0))
    tl.store(out.top_ids + b * top + place, ids.to(out.top_ids.dtype.element_ty), mask=place < top)
    tl.store(out.top_logprobs + b * top + place, logprob, mask=place < top)


@host.entry
def _look_kernel(
    digest, plan, target, sampling, token_ids, lists, out, top, count, tiles, settles,
    TOP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of x: log p = (l - max) / T - log mass, 1 + how many kept ids have a larger logit; the largest. Grid: rows."""
    b = tl.program_id(0).to(tl.int64)
    settings = sampling_of(sampling, b, target.vocab)
    inv_t, greedy = settings.inv_t, settings.greedy
    active, planned = is_active(sampling, b), row_of(plan, b)
    view = View(target, planned.offset, planned.number, maxima_of(digest, digest.blocks, b, TILE))
    digest = Digest(count, tiles, *digest[2:])
    if active & (settles > 0):
        settle_row(digest, view, None, b, sampling, b, True, False, False, False, TILE)
    bad = active & (get_record_i(digest, b, Q_STATE, active) == BAD)
    good = active & (bad == 0)
    law = law_of(digest, b)
    log_mass = tl.log(tl.where(good, get_record_f(digest, b, R_MASS, active), 1.0))
    argmax = get_record_i(digest, b, Q_ARG, good)
    token = tl.load(token_ids + b, mask=active, other=-1).to(tl.int64)
    has = (token >= 0) & (token < target.vocab)
    x = logits_at(target, view.offset, view.number, tl.where(has, token, 0), has & good)
    picked = lists.blocks + b * SPAN

    stays = fact(kept(x, law.threshold))
    if greedy:
        stays = token == argmax
    logprob = tl.where(stays, (x - law.maximum) * inv_t - log_mass, float("-inf"))
    logprob = tl.where(has, tl.where(bad, float("nan"), logprob), 0.0)
    rank = tl.full([], 0, tl.int32)
    if has & good:
        if greedy:
            rank = tl.where(stays, 1, 2)
        else:
            rank = 1 + _count(view, tl.where(stays, _next_above(key_of(x)), tl.maximum(law.threshold, LOWEST)), picked)
    status = tl.where(settings.bad, S_SAMPLING, 0) | tl.where(bad, S_TARGET, 0)
    tl.store(out.logprobs + b, logprob)
    tl.store(out.ranks + b, rank)
    tl.store(out.status + b, status | tl.where(has | (token == -1), 0, S_ID))
    if TOP:
        lists = Lists(picked, lists.logits + b * CAPACITY, lists.ids + b * CAPACITY)
        found = tl.full([], 0, tl.int32)
        if good:
            if greedy:
                tl.store(lists.logits, law.maximum)
                tl.store(lists.ids, argmax)
                found += 1
            else:
                found = _list(view, law, top, lists)
        _write_best(out, lists, b, found, law, inv_t, log_mass, active, top)


def token_logprobs_out(
    logits: Tensor, token_ids: Tensor, top: int, sampling: Sampling, allowed: Tensor | None, edits: RowEdits,
    logprobs: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.token_logprobs`."""
    count = logits.shape[0]
    rows = scratch.rows_of(logits.unsqueeze(1), allowed=allowed, edits=edits)
    on = look(count, rows, None, sampling, sampling, 1, 0)
    chain = Chain(token_ids, None, host.size(0), host.size(0), on.sampling)
    on = on_chains(on, chain, None)
    settles = on.work is None
    digest_rows(on, None, settles=not settles)

    def make(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, width, dtype=dtype, device=logits.device)

    lists = Lists(make(SPAN.value, torch.int32), None, None)
    if top:
        lists = lists._replace(
            logits=make(CAPACITY.value, torch.float32), ids=make(CAPACITY.value, torch.int32)
        )  # fmt: skip
    out = Scores(logprobs, ranks, top_ids, top_logprobs, status)
    host.launch(
        _look_kernel, count, on.digest, on.plan, rows, on.sampling, token_ids, lists, out, top, on.rows,
        on.digest.tiles, int(settles), TOP=top > 0, TILE=host.TILE, **host.MANY_REGISTERS,
    )  # fmt: skip
