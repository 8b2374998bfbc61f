"""Blocks of a row that matter, 32 or 16 at a time: whose bound may still win a race, whose logits reach a value.

Blocks are looked at 2048 at once, in 32 groups: of each, or of each two, the best block that was not visited comes
next, if it reaches what it has to. A group is made of whole quads of blocks, whose noise one Philox call names.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launch import entry
from .laws import draft_logits_at, kept, prob
from .noise import BLOCK, block_noise, least_at, log, luck_of, noise_of
from .race import race_scores, winner
from .rows import ids_of_blocks, logits_of_blocks


class View(NamedTuple):
    """One row: where it begins, its number, the maxima of its blocks."""

    rows: Any
    offset: Any
    number: Any
    blocks: Any


class Rest(NamedTuple):
    """What a residual a p - b q takes from a target row: a draft row over target ids; `Rest()` takes nothing."""

    draft: Any = None
    columns: Any = None
    offset: Any = None
    number: Any = None
    law: Any = None
    inv_t: Any = None
    a: Any = None
    b: Any = None
    shift: Any = None  # of the law, if it has one


GROUPS, EACH = tl.constexpr(32), tl.constexpr(64)  # groups, and blocks of each
# Rows that eight warps settle look into half as many at once: 780 instructions a thread in place of 1450, for 4.5 turns
# in place of 3.1 on rows like a language model's. Sixteen warps gain nothing.
HALF = tl.constexpr(16)
SPAN = tl.constexpr(2048)  # blocks of all groups
# What a bound may lie too low: logarithms are approximate, and probabilities carry rounding errors.
MARGIN, RESIDUAL_MARGIN = tl.constexpr(0.0001220703125), tl.constexpr(0.0009765625)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def span_blocks(start, N: tl.constexpr = GROUPS):
    """Numbers of the blocks of N groups, [N, EACH]."""
    group = tl.arange(0, N)
    j = tl.arange(0, EACH)
    return (j[None, :] // 4) * (N * 4) + group[:, None] * 4 + j[None, :] % 4 + start


@triton.jit
def span_maxima(blocks, start, count, N: tl.constexpr = GROUPS):
    """Largest logits of the blocks of N groups, -inf past the end; NaN counts as -inf."""
    b = span_blocks(start, N)
    x = tl.load(blocks + b, mask=b < count, other=float("-inf")).to(tl.float32)
    return tl.where(x > float("-inf"), x, float("-inf"))


@triton.jit
def _best_of_groups(bounds, start):
    """(largest bound, its block, where it lies) of each group; the lowest of equals."""
    N: tl.constexpr = bounds.shape[0]
    j = tl.arange(0, EACH)[None, :]
    top = tl.max(bounds, axis=1)
    at = tl.min(tl.where(bounds == top[:, None], j, EACH), axis=1)
    return top, (at // 4) * (N * 4) + tl.arange(0, N) * 4 + at % 4 + start, j == at[:, None]


@triton.jit
def next_blocks(bounds, reach, start):
    """(the best block of each group, whether it reaches, bounds without them)."""
    top, block, here = _best_of_groups(bounds, start)
    return block, (top >= reach) & (top > float("-inf")), tl.where(here, float("-inf"), bounds)


@triton.jit
def next_of_halves(low, high, reach, start):
    """The same of two halves of a span: of a group of each the better block."""
    top, block, here = _best_of_groups(low, start)
    other, its, there = _best_of_groups(high, start + HALF * EACH)
    is_low = top >= other
    low = tl.where(here & is_low[:, None], float("-inf"), low)
    high = tl.where(there & (is_low == 0)[:, None], float("-inf"), high)
    top = tl.maximum(top, other)
    return tl.where(is_low, block, its), (top >= reach) & (top > float("-inf")), low, high


@triton.jit
def pick(view, start, count, least, picked, SIZE: tl.constexpr):
    """How many of SIZE blocks have an id from `least` on; their numbers are listed in order."""
    block = start + tl.arange(0, SIZE)
    x = tl.load(view.blocks + block, mask=block < count, other=float("-inf")).to(tl.float32)
    on = x >= least
    place = tl.cumsum(on.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # who still reads those of the last span
    tl.store(picked + place, block, mask=on)
    tl.debug_barrier()
    return tl.sum(on.to(tl.int32), axis=0)


@triton.jit
def picked_logits(view, picked, first, n, BLOCKS: tl.constexpr):
    """(logits, ids) of some of the n blocks, [BLOCKS, BLOCK]; -inf where there is none."""
    at = first + tl.arange(0, BLOCKS)
    block = tl.load(picked + at, mask=at < n, other=0)
    v, _there, x = logits_of_blocks(view.rows, view.offset, view.number, block, at < n)
    return x, v


@triton.jit
def is_excluded(v, exclude, excluded):
    """Whether ids (of any shape) are among those listed."""
    out = v < 0
    for j in range(0, excluded):
        out = out | (v == tl.load(exclude + j))
    return out


@entry
def least_kernel(table, token_map, noise, vocab, blocks, PURPOSE: tl.constexpr):
    """Smallest noise in each block of columns that stand for other ids. Grid: batch * ceil(blocks / GROUPS)."""
    pid = tl.program_id(0).to(tl.int64)
    spans = (blocks + GROUPS - 1) // GROUPS
    b = pid // spans
    block = (pid % spans).to(tl.int32) * GROUPS + tl.arange(0, GROUPS)
    v, there = ids_of_blocks(block, block < blocks, vocab)
    ids = tl.load(token_map + v, mask=there, other=0)
    least = least_at(noise, b, tl.load(noise.position + b), PURPOSE, ids)
    least = tl.min(tl.where(there, least, float("inf")), axis=1)
    tl.store(table + b * blocks + block, least, mask=block < blocks)


@triton.jit
def _replace(best, names, columns, score, ids, v):
    """The best one after new scores."""
    top, name = winner(score, ids)
    top, name = tl.broadcast_to(top, best.shape), tl.broadcast_to(name, names.shape)
    wins = (top > best) | ((top == best) & (top > float("-inf")) & (name < names))
    column = name
    if v is not None:
        column = tl.max(tl.where((score == top) & (ids == name), v, -1), axis=0)
    return tl.where(wins, top, best), tl.where(wins, name, names), tl.where(wins, column, columns)


@triton.jit
def _insert(best, names, columns, score, ids, v, n):
    """The best n after new scores: as long as one beats the worst of the n, it takes its place."""
    lane = tl.arange(0, best.shape[0])
    held = lane < n
    going = tl.full([], 1, tl.int32)
    while going > 0:
        top, name = winner(score, ids)
        worst = tl.min(tl.where(held, best, float("inf")), axis=0)
        last = tl.max(tl.where(held & (best == worst), names, -1), axis=0)  # of equals the highest id goes first
        wins = (top > worst) | ((top == worst) & (top > float("-inf")) & (name < last))
        going = tl.where(wins, 1, 0)
        if going > 0:
            hit = (score == top) & (ids == name)
            column = tl.max(tl.where(hit, v, -1), axis=0)
            place = tl.max(tl.where(held & (best == worst) & (names == last), lane, -1), axis=0)
            best = tl.where(lane == place, top, best)
            names = tl.where(lane == place, name, names)
            columns = tl.where(lane == place, column, columns)
            score = tl.where(hit & (v == column), float("-inf"), score)
    return best, names, columns


@triton.jit
def _bounds(view, law, inv_t, rest, least, noise, b, position, start, count, PURPOSE: tl.constexpr, N: tl.constexpr):
    """What the score of no id of a block can exceed, [N, EACH]."""
    maxima = span_maxima(view.blocks, start, count, N)
    bounds = (maxima - law.maximum) * inv_t
    if rest.a is not None:
        most = tl.maximum(rest.a * law.scale, TINY)
        bounds += tl.log(most) + RESIDUAL_MARGIN
    if least is None:
        quad = tl.arange(0, EACH // 4)[None, :] * N + tl.arange(0, N)[:, None] + start // 4
        luck = luck_of(noise, b, position, PURPOSE, quad)
    else:
        block = span_blocks(start, N)
        luck = -tl.log(tl.load(least + block, mask=block < count, other=1.0))
    bounds = bounds + (MARGIN + luck)
    return tl.where(kept(maxima, law.threshold), bounds, float("-inf"))


@triton.jit
def _scores(
    view, law, inv_t, rest, token_map, exclude, excluded, noise, b, position, block, chosen, PURPOSE: tl.constexpr
):
    """(scores, names, columns) of the ids of n blocks, [n * BLOCK]."""
    SIZE: tl.constexpr = block.shape[0] * BLOCK
    v, there, x = logits_of_blocks(view.rows, view.offset, view.number, block, chosen)
    competes = kept(x, law.threshold)
    logweight = (x - law.maximum) * inv_t
    if rest.a is not None:
        y = draft_logits_at(rest.draft, rest.columns, rest.offset, rest.number, v, there)
        weight = rest.a * prob(x, law, inv_t) - rest.b * prob(y, rest.law, rest.inv_t, rest.shift)
        competes = weight >= TINY
        logweight = log(tl.where(competes, weight, 1.0))
    if token_map is None:
        ids = v
        neg_log_e = block_noise(noise, b, position, PURPOSE, block)
    else:
        ids = tl.load(token_map + v, mask=there, other=0)
        neg_log_e = noise_of(noise, b, position, PURPOSE, ids)
    if exclude is not None:
        competes = competes & (is_excluded(ids, exclude, excluded) == 0)
    score = race_scores(logweight, competes, neg_log_e)
    return tl.reshape(score, (SIZE,)), tl.reshape(ids, (SIZE,)), tl.reshape(v, (SIZE,))


@triton.jit
def race(
    view, law, inv_t, noise, b, position, rest, exclude, excluded, token_map, least, n,
    PURPOSE: tl.constexpr, NP: tl.constexpr, HALVES: tl.constexpr = False,
):  # fmt: skip
    """(scores, ids, columns), [NP], of the n ids with the largest log-weight - log E; -inf, -1, -1 past the last.

    exclude: ids that do not compete. Weights are p, or with a `Rest` a p - b q, which a p bounds.
    """
    best = tl.full([NP], float("-inf"), tl.float32)
    names, places = tl.full([NP], -1, tl.int32), tl.full([NP], -1, tl.int32)
    count = (view.rows.vocab + BLOCK - 1) // BLOCK
    N: tl.constexpr = HALF if HALVES else GROUPS
    for start in range(0, count, SPAN):
        bounds = _bounds(view, law, inv_t, rest, least, noise, b, position, start, count, PURPOSE, N)
        if HALVES:
            more = _bounds(view, law, inv_t, rest, least, noise, b, position, start + HALF * EACH, count, PURPOSE, N)
        going = tl.full([], 1, tl.int32)
        while going > 0:
            reach = tl.min(tl.where(tl.arange(0, NP) < n, best, float("inf")), axis=0)
            if HALVES:
                block, chosen, bounds, more = next_of_halves(bounds, more, reach, start)
            else:
                block, chosen, bounds = next_blocks(bounds, reach, start)
            going = tl.max(chosen.to(tl.int32), axis=0)
            if going > 0:
                score, ids, v = _scores(
                    view, law, inv_t, rest, token_map, exclude, excluded, noise, b, position, block, chosen, PURPOSE
                )
                if NP == 1 and view.rows.changes is None:  # with edits this would spill, the loop does not
                    best, names, places = _replace(best, names, places, score, ids, None if token_map is None else v)
                else:
                    best, names, places = _insert(best, names, places, score, ids, v, n)
    return best, names, places


@triton.jit
def draw(
    view, law, inv_t, noise, b, position, rest, exclude, excluded, PURPOSE: tl.constexpr, HALVES: tl.constexpr = False
):
    """(score, id) of the winner of a race; (-inf, -1) if nobody competes."""
    best, names, _ = race(
        view, law, inv_t, noise, b, position, rest, exclude, excluded, None, None, 1, PURPOSE, 1, HALVES
    )
    return tl.max(best, axis=0), tl.max(names, axis=0)
