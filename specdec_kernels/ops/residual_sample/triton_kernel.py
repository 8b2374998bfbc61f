"""residual_sample in Triton: the laws of both rows, then one pass that sums and races. Two launches."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.codes import S_EMPTY
from ..._triton.handshake import arrive
from ..._triton.laws import kept, law_of
from ..._triton.noise import log, tile_noise
from ..._triton.race import race_scores, winner
from ..._triton.residual import Scaled, laws, residual_case, residual_tile
from ..._triton.rows import Noise, Sampling
from ..._triton.stats import (
    F_MAX,
    F_RAW_MAX,
    F_SCORE,
    F_SUM,
    I_ARG,
    I_WINNER,
    Q_ARG,
    get_f,
    get_i,
    get_record_i,
    put_f,
    put_i,
)

TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _draw_kernel(
    pairs, scaled, noise, part, token_ids, mass, status,
    PURPOSE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr,
):  # fmt: skip
    """Token = argmax_v log((a p - b q)+) - log E(v); mass = sum of the weights.

    Where q is a point mass at x the other ids keep their plain log-weights l / T (as verify_chain draws), and x has
    l / T + log((a p - b) / (a p)). An empty residual is drawn from p.
    Grid: batch * tiles; a program owns one tile, the last of a request writes.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % part.tiles).to(tl.int32)
    b = pid // part.tiles
    x, point, is_row, bad, code, inv_t, greedy = residual_case(pairs, scaled, b, ROWS)
    row = 2 * b if ROWS else b
    v = tile * TILE + tl.arange(0, TILE)
    logits, p, weight = residual_tile(pairs, scaled, b, tile, x, point, is_row, inv_t, greedy, ROWS, TILE)
    weight = tl.where(bad, 0.0, weight)
    neg_log_e = tile_noise(noise, b, tl.load(noise.position + b), PURPOSE, tile * TILE, TILE)
    argmax = get_record_i(pairs.ws, row, Q_ARG, b >= 0)
    in_law = kept(logits, law_of(pairs.ws, row)[3]) & ((greedy == 0) | (v == argmax))
    plain = logits * inv_t
    best, at = winner(race_scores(plain, in_law, neg_log_e), v)
    put_f(part, F_SCORE, b, tile, best)
    put_i(part, I_WINNER, b, tile, at)
    alive = weight >= TINY
    point = point & (tl.load(scaled.b + b) != 0)
    logweight = log(tl.where(alive, weight, 1.0))
    if point:
        own = v == x
        share = tl.div_rn(weight, tl.maximum(tl.load(scaled.a + b) * p, TINY))
        logweight = tl.where(own, plain + log(tl.maximum(share, TINY)), plain)
        alive = in_law & ((own == 0) | (weight >= TINY))
    best, at = winner(race_scores(logweight, alive, neg_log_e), v)
    put_f(part, F_MAX, b, tile, best)
    put_i(part, I_ARG, b, tile, at)
    put_f(part, F_SUM, b, tile, tl.sum(weight, axis=0))
    put_f(part, F_RAW_MAX, b, tile, tl.max(weight, axis=0))
    if arrive(part.tickets + b, part.tiles):
        score, token = winner(get_f(part, F_SCORE, b, T_PAD, float("-inf")), get_i(part, I_WINNER, b, T_PAD, -1))
        token = tl.where(score > float("-inf"), token, argmax)
        score, other = winner(get_f(part, F_MAX, b, T_PAD, float("-inf")), get_i(part, I_ARG, b, T_PAD, -1))
        other = tl.where(score > float("-inf"), other, argmax)
        empty = tl.max(get_f(part, F_RAW_MAX, b, T_PAD, 0.0), axis=0) < TINY
        draws_residual = (empty == 0) & (point | (is_row & (tl.load(scaled.b + b) != 0)))
        token = tl.where(draws_residual, other, token)
        tl.store(token_ids + b, tl.where(bad, -1, token).to(tl.int64))
        tl.store(mass + b, tl.sum(get_f(part, F_SUM, b, T_PAD, 0.0), axis=0))
        tl.store(status + b, tl.where(empty & (bad == 0), code | S_EMPTY, code))


def residual_sample_out(
    target_logits: Tensor, draft_logits: Tensor | None, a: Tensor, b: Tensor,
    temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    draft_temperature: Tensor | None, draft_top_k: Tensor | None, draft_top_p: Tensor | None,
    draft_min_p: Tensor | None, token_map: Tensor | None, allowed: Tensor | None, draft_ids: Tensor | None,
    seed: Tensor, position: Tensor, step: Tensor | None, purpose: int,
    token_ids: Tensor, mass: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.residual_sample`."""
    batch, vocab = target_logits.shape
    pairs = laws(
        target_logits, draft_logits, Sampling(temperature, top_k, top_p, min_p),
        Sampling(draft_temperature, draft_top_k, draft_top_p, draft_min_p), token_map, allowed,
    )  # fmt: skip
    # Two races and a pair of rows a tile: half a tile keeps them in registers.
    tile = max(host.TILE // 2, 32)
    tiles = max(triton.cdiv(vocab, tile), 1)
    part = scratch.partials(pairs.ws.tickets, batch, tiles)
    host.launch(
        _draw_kernel, batch * tiles, pairs, Scaled(a, b, draft_ids), Noise(seed, position, step, None), part,
        token_ids, mass, status, PURPOSE=purpose, ROWS=draft_logits is not None, TILE=tile, T_PAD=host.power(tiles),
    )  # fmt: skip
