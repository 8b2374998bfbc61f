"""select_state, spelled plainly: the state after the last accepted token replaces state 0."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._cache import locate, move
from ..._codes import Status


def select_state(
    tensors: list[Tensor],
    table: Tensor,
    block_table: Tensor | None,
    page_size: int,
    num_pages: int,
    num_accepted: Tensor,
) -> Tensor:
    """See `specdec_kernels.select_state`."""
    count = num_accepted.long()[:, None]
    moves = count > 0
    source = locate(block_table, page_size, num_pages, count)
    target = locate(block_table, page_size, num_pages, torch.zeros_like(count))
    bad = (count < -1) | (moves & ~(source.exists & target.exists))
    move(tensors, source, target, moves & ~bad)
    return torch.where(bad[:, 0], Status.BAD_LAYOUT, 0).int()
