# ruff: noqa: SIM102 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""residual_sample in Triton: digest and settle both rows, sum the weights, draw."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.chains import number_of, row_offset
from ..._triton.codes import S_EMPTY
from ..._triton.laws import kept, law_of, prob
from ..._triton.noise import log, noise_of
from ..._triton.pairs import Pairs
from ..._triton.plan import row_of
from ..._triton.race import better, race_scores
from ..._triton.records import Q_ARG, get_record_i
from ..._triton.residual import mass_of, pairs_of, residual_case
from ..._triton.rows import logits_at, sampling_of
from ..._triton.settle import maxima_of
from ..._triton.visit import TINY, Rest, View, draw
from ..._types import ResidualArguments, RngKey


@triton.jit
def _score_of(pairs, scaled, noise, b, x, view, law, inv_t, PURPOSE: tl.constexpr):
    """Score of the id of a point mass: l / T + log((a p - b) / (a p)), relative to the maximum."""
    logit = logits_at(view.rows, view.offset, view.number, x, x >= 0)
    whole = tl.load(scaled.a + b) * prob(logit, law, inv_t)
    weight = whole - tl.load(scaled.b + b)
    share = tl.maximum(tl.div_rn(weight, tl.maximum(whole, TINY)), TINY)
    alive = kept(logit, law.threshold) & (weight >= TINY)
    neg_log_e = noise_of(noise, b, tl.load(noise.position + b), PURPOSE, x.to(tl.int32))
    return race_scores((logit - law.maximum) * inv_t + log(share), alive, neg_log_e)


@host.entry
def _draw_kernel(
    pairs, scaled, sums, batch, noise, token_ids, mass, status,
    PURPOSE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Token = argmax_v log((a p - b q)+) - log E(v); mass = sum of the weights. Grid: batch.

    Where q is a point mass at x the other ids keep their plain log-weights (as verify_chain draws). An empty residual
    is drawn from p.
    """
    pairs = Pairs(*pairs)
    b = tl.program_id(0).to(tl.int64)
    x, point, is_row, bad, code, inv_t, greedy = residual_case(pairs, scaled, b, ROWS)
    row = 2 * b if ROWS else b
    total, most = mass_of(pairs, sums, b, batch)
    empty = (most < TINY) & (bad == 0)
    tl.store(mass + b, total)
    tl.store(status + b, tl.where(empty, code | S_EMPTY, code))
    token = get_record_i(pairs.ws, row, Q_ARG, b >= 0)
    if (bad == 0) & (greedy == 0):
        planned = row_of(pairs.plan, row)
        view = View(pairs.target, planned.offset, planned.number, maxima_of(pairs.ws, pairs.ws.blocks, row, TILE))
        law = law_of(pairs.ws, row)
        position = tl.load(noise.position + b)
        subtracts = (tl.load(scaled.b + b) != 0) & (empty == 0)
        best = tl.full([], float("-inf"), tl.float32)
        if ROWS:
            if is_row & subtracts:
                draft_inv_t = sampling_of(pairs.draft_sampling, b, pairs.draft.vocab).inv_t
                offset = row_offset(pairs.draft, pairs.chain, b * 0, b, b * 0, 0)
                number = number_of(pairs.chain, b * 0, b, b * 0)
                rest = Rest(
                    pairs.draft, pairs.columns, offset, number, law_of(pairs.ws, row + 1), draft_inv_t,
                    tl.load(scaled.a + b), tl.load(scaled.b + b),
                )  # fmt: skip
                best, token = draw(view, law, inv_t, noise, b, position, rest, None, 0, PURPOSE)
        if best == float("-inf"):
            is_point = point & subtracts
            excluded = tl.where(is_point, 1, 0)
            own = None
            if scaled.ids is not None:
                own = scaled.ids + b
            best, token = draw(view, law, inv_t, noise, b, position, Rest(), own, excluded, PURPOSE)
            if is_point:
                score = _score_of(pairs, scaled, noise, b, x, view, law, inv_t, PURPOSE)
                best, token = better(best, token, score, x.to(tl.int32), is_point)
    tl.store(token_ids + b, tl.where(bad, -1, token).to(tl.int64))


def residual_sample_out(
    given: ResidualArguments, rng: RngKey, purpose: int, token_ids: Tensor, mass: Tensor,
    status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.residual_sample`."""
    noise = scratch.noise_of(rng)
    pairs, scaled, sums, seen = pairs_of(given, noise)
    batch = mass.shape[0]
    host.launch_alone(
        _draw_kernel, batch, pairs, scaled, sums, batch, noise, token_ids, mass, status,
        PURPOSE=purpose, ROWS=given.draft_logits is not None, TILE=host.TILE, seen=seen,
        **scratch.options_of(pairs.target, pairs.draft),
    )  # fmt: skip
