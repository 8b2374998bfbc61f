"""Target and draft rows side by side, over target ids: (p, q) of a tile, and what was summed of the tiles."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import launch as host
from . import scratch
from .chains import Columns, number_of, row_offset
from .laws import draft_logits_at, law_of, probs
from .records import Q_ARG, get_record_i
from .rows import Rows, load_asked, sampling_of

TILES = tl.constexpr(64)  # tiles whose sums are added up at once


class Pairs(NamedTuple):
    """Rows of a call; the names are those of `walk.Call`, whose helpers take either."""

    chain: Any
    target: Any
    draft: Any
    columns: Any
    sampling: Any
    draft_sampling: Any
    ws: Any
    plan: Any


def options_of(target: Rows, draft: Rows, columns: Columns) -> dict[str, int]:
    """Launch options of a kernel that has a tile of a row pair: with a map, 4 warps take longer to look columns up."""
    streams = {"num_warps": host.STREAM_WARPS} if columns.token_map is None else {}
    return {**streams, **scratch.options_of(target, draft)}


@triton.jit
def target_probs(call, b, i, first, row, tile, inv_t, greedy, TILE: tl.constexpr):
    """(masked target logits, p) of one tile of target row i; a greedy row is a point mass at its argmax."""
    start = tile * TILE
    offset, number = row_offset(call.target, call.chain, first, b, i, 1), number_of(call.chain, first, b, i)
    x = load_asked(call.target, offset, number, start, TILE)
    p = probs(x, law_of(call.ws, row), inv_t)
    if greedy:
        p = (start + tl.arange(0, TILE) == get_record_i(call.ws, row, Q_ARG, b >= 0)).to(tl.float32)
    return x, p


@triton.jit
def draft_probs(call, b, i, first, tile, law, TILE: tl.constexpr, shift=None):
    """(draft logits, q) of one tile of draft row i, over target ids."""
    v = tile * TILE + tl.arange(0, TILE)
    inv_t = sampling_of(call.draft_sampling, b, call.draft.vocab).inv_t
    offset = row_offset(call.draft, call.chain, first, b, i, 0)
    number = number_of(call.chain, first, b, i)
    if call.columns.kept is None and call.columns.token_map is None:  # 16 bytes a load, not one number
        y = load_asked(call.draft, offset, number, tile * TILE, TILE)
    else:
        y = draft_logits_at(call.draft, call.columns, offset, number, v, v < call.target.vocab)
    return y, probs(y, law, inv_t, shift)


@triton.jit
def add_tiles(sums, tiles):
    """Sum of the tiles' sums."""
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, tiles, TILES):
        t = start + tl.arange(0, TILES)
        total += tl.sum(tl.load(sums + t, mask=t < tiles, other=0.0), axis=0)
    return total
