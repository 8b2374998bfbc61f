# ruff: noqa: SIM102 - `if` on a constexpr prunes code
"""The token after a walk: drawn from the one row, or pair of rows, that it ended at, by the program that walked."""

import triton
import triton.language as tl

from .codes import RESIDUAL_PURPOSE, S_EMPTY
from .laws import law_of
from .noise import log, noise_of
from .plan import row_of
from .race import better, race_scores, winner
from .settle import maxima_of
from .visit import TINY, Rest, View, draw
from .walk import FIXED, NOTHING, POINT, RESIDUAL


@triton.jit
def _draw_listed(call, b, position, ids, weights, count, NP: tl.constexpr):
    """(score, id) of the winner among listed ids with weights of their own; of equal ids the last one counts."""
    j = tl.arange(0, NP)
    v = tl.load(ids + j, mask=j < count, other=-1)
    weight = tl.load(weights + j, mask=j < count, other=0.0)
    for i in range(1, count):
        weight = tl.where((v == tl.load(ids + i)) & (j < i), 0.0, weight)
    neg_log_e = noise_of(call.noise, b, position, RESIDUAL_PURPOSE, tl.maximum(v, 0))
    alive = weight >= TINY
    return winner(race_scores(log(tl.where(alive, weight, 1.0)), alive, neg_log_e), v)


@triton.jit
def draw_next(
    call, b, row, how, status, token, inv_t, rest, is_late, exclude, excluded, weights,
    PAIRS: tl.constexpr, TILE: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """(token, status): drawn as `how` says; `token` stays where it is known. rest: `visit.Rest`.

    What is excluded counts where a point mass was rejected; in a residual too if it has weights of its own. An empty
    residual, and a point mass without which nothing is left, are drawn from p; so is a late one: a residual whose
    draft row turned out bad.
    """
    if (how != NOTHING) & (how != FIXED):
        planned = row_of(call.plan, row)
        view = View(call.target, planned.offset, planned.number, maxima_of(call.ws, call.ws.blocks, row, TILE))
        law = law_of(call.ws, row)
        position = planned.position
        best = tl.full([], float("-inf"), tl.float32)
        if PAIRS:
            if (how == RESIDUAL) & (is_late == 0):
                if weights is None:
                    best, token = draw(view, law, inv_t, call.noise, b, position, rest, None, 0, RESIDUAL_PURPOSE)
                else:
                    best, token = draw(
                        view, law, inv_t, call.noise, b, position, rest, exclude, excluded, RESIDUAL_PURPOSE
                    )
                    score, other = _draw_listed(call, b, position, exclude, weights, excluded, NP)
                    best, token = better(best, token, score, other, excluded > 0)
                status |= tl.where(best > float("-inf"), 0, S_EMPTY)
        count = tl.where(how == POINT, excluded, 0)
        going = tl.where(best > float("-inf"), 0, 1)
        while going > 0:
            best, token = draw(view, law, inv_t, call.noise, b, position, Rest(), exclude, count, RESIDUAL_PURPOSE)
            going = tl.where((best > float("-inf")) | (count == 0), 0, 1)
            status |= tl.where(going > 0, S_EMPTY, 0)
            count = count * 0
    return token, status
