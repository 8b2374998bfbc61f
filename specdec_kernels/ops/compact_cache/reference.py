"""compact_cache, spelled plainly: read every row of the accepted path, then write them behind the root."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._cache import locate, move
from ..._codes import Status


def compact_cache(
    tensors: list[Tensor],
    table: Tensor,
    block_table: Tensor | None,
    page_size: int,
    num_pages: int,
    path: Tensor,
    num_accepted: Tensor,
    lengths: Tensor,
) -> Tensor:
    """See `specdec_kernels.compact_cache`."""
    depth = torch.arange(1, path.shape[1] + 1, device=path.device)
    node, count, length = path.long(), num_accepted.long()[:, None], lengths.long()[:, None]
    used = depth <= count
    rises = node > torch.nn.functional.pad(node, (1, 0))[:, :-1]
    moves = used & (node > depth)
    source = locate(block_table, page_size, num_pages, length + node)
    target = locate(block_table, page_size, num_pages, length + depth)
    bad = (used & ~rises) | (moves & ~(source.exists & target.exists))
    bad = bad.any(1, keepdim=True) | (count < -1) | (count > path.shape[1]) | ((count >= 0) & (length < 0))
    move(tensors, source, target, moves & ~bad)
    return torch.where(bad[:, 0], Status.BAD_LAYOUT, 0).int()
