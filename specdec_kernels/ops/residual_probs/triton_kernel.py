"""residual_probs in Triton: digest and settle both rows, sum the weights, write the probabilities."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton.codes import S_EMPTY
from ..._triton.pairs import Pairs, options_of
from ..._triton.residual import mass_of, pairs_of, residual_case, residual_tile
from ..._triton.visit import TINY
from ..._types import ResidualArguments


@host.entry
def _write_kernel(pairs, scaled, sums, batch, mass, status, probs, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Probs = (a p - b q)+ / mass, p where that is empty, 0 on a bad row. Grid: batch * tiles, a tile a program."""
    pairs = Pairs(*pairs)
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % pairs.ws.tiles).to(tl.int32)
    b = pid // pairs.ws.tiles
    x, point, is_row, bad, code, inv_t, greedy = residual_case(pairs, scaled, b, ROWS)
    total, most = mass_of(pairs, sums, b, batch)
    empty = (most < TINY) & (bad == 0)
    if tile == 0:
        tl.store(mass + b, total)
        tl.store(status + b, tl.where(empty, code | S_EMPTY, code))
    share = tl.zeros([TILE], tl.float32)
    if bad == 0:
        _, p, weight = residual_tile(pairs, scaled, b, tile, x, point, is_row, inv_t, greedy, ROWS, TILE)
        share = tl.where(empty, p, weight * tl.div_rn(tl.full([], 1.0, tl.float32), tl.maximum(total, TINY)))
    v = tile * TILE + tl.arange(0, TILE)
    tl.store(probs + b * pairs.target.vocab + v, share, mask=v < pairs.target.vocab)


def residual_probs_out(
    given: ResidualArguments, probs: Tensor, mass: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.residual_probs`."""
    pairs, scaled, sums, seen = pairs_of(given, None)
    batch = mass.shape[0]
    host.launch(
        _write_kernel, batch * pairs.ws.tiles, pairs, scaled, sums, batch, mass, status, probs,
        ROWS=given.draft_logits is not None, TILE=host.TILE, seen=seen,
        **options_of(pairs.target, pairs.draft, pairs.columns),
    )  # fmt: skip
