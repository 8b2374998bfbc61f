# ruff: noqa: RUF059 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""residual_probs in Triton: the laws of both rows, the mass, the probabilities. Three launches."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.codes import S_EMPTY
from ..._triton.handshake import arrive
from ..._triton.residual import Scaled, laws, residual_case, residual_tile
from ..._triton.rows import Sampling
from ..._triton.stats import F_MAX, F_SUM, get_f, put_f

TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _mass_kernel(pairs, scaled, part, mass, status, ROWS: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr):
    """Mass = sum_v (a p - b q)+. Grid: batch * tiles; a program owns one tile, the last of a request adds up."""
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % part.tiles).to(tl.int32)
    b = pid // part.tiles
    x, point, is_row, bad, code, inv_t, greedy = residual_case(pairs, scaled, b, ROWS)
    logits, p, weight = residual_tile(pairs, scaled, b, tile, x, point, is_row, inv_t, greedy, ROWS, TILE)
    weight = tl.where(bad, 0.0, weight)
    put_f(part, F_SUM, b, tile, tl.sum(weight, axis=0))
    put_f(part, F_MAX, b, tile, tl.max(weight, axis=0))
    if arrive(part.tickets + b, part.tiles):
        empty = (tl.max(get_f(part, F_MAX, b, T_PAD, 0.0), axis=0) < TINY) & (bad == 0)
        tl.store(mass + b, tl.sum(get_f(part, F_SUM, b, T_PAD, 0.0), axis=0))
        tl.store(status + b, tl.where(empty, code | S_EMPTY, code))


@triton.jit
def _write_kernel(pairs, scaled, tiles, mass, status, probs, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Probs = (a p - b q)+ / mass, p where that is empty, 0 on a bad row. Grid: batch * tiles, a tile a program."""
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % tiles).to(tl.int32)
    b = pid // tiles
    x, point, is_row, bad, code, inv_t, greedy = residual_case(pairs, scaled, b, ROWS)
    logits, p, weight = residual_tile(pairs, scaled, b, tile, x, point, is_row, inv_t, greedy, ROWS, TILE)
    empty = (tl.load(status + b) & S_EMPTY) != 0
    total = tl.load(mass + b)
    share = tl.div_rn(weight, tl.maximum(total, TINY))
    share = tl.where(bad, 0.0, tl.where(empty, p, share))
    v = tile * TILE + tl.arange(0, TILE)
    tl.store(probs + b * pairs.target.vocab + v, share, mask=v < pairs.target.vocab)


def residual_probs_out(
    target_logits: Tensor, draft_logits: Tensor | None, a: Tensor, b: Tensor,
    temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    draft_temperature: Tensor | None, draft_top_k: Tensor | None, draft_top_p: Tensor | None,
    draft_min_p: Tensor | None, token_map: Tensor | None, allowed: Tensor | None, draft_ids: Tensor | None,
    probs: Tensor, mass: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.residual_probs`."""
    batch, vocab = target_logits.shape
    pairs = laws(
        target_logits, draft_logits, Sampling(temperature, top_k, top_p, min_p),
        Sampling(draft_temperature, draft_top_k, draft_top_p, draft_min_p), token_map, allowed,
    )  # fmt: skip
    tiles, has_rows, scaled = host.tiles_of(vocab), draft_logits is not None, Scaled(a, b, draft_ids)
    part = scratch.partials(pairs.ws.tickets, batch, tiles)
    host.launch(
        _mass_kernel, batch * tiles, pairs, scaled, part, mass, status,
        ROWS=has_rows, TILE=host.TILE, T_PAD=host.power(tiles),
    )  # fmt: skip
    host.launch(_write_kernel, batch * tiles, pairs, scaled, tiles, mass, status, probs, ROWS=has_rows, TILE=host.TILE)
