"""gather_nodes, spelled plainly: the root's row, then the rows of the accepted path, then zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._codes import Status


def gather_nodes(values: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """See `specdec_kernels.gather_nodes`; values are [batch, nodes, n] of any dtype."""
    nodes = values.shape[1]
    node = torch.nn.functional.pad(path.long(), (1, 0))[:, :-1]
    before_end = (node != -1).int().cumprod(1).bool()
    known = (node >= 0) & (node < nodes)
    status = torch.where((before_end & ~known).any(1), Status.BAD_LAYOUT, 0).int()
    taken = before_end & known.int().cumprod(1).bool()
    stored = values.view(torch.uint8)  # bytes are moved: every dtype is taken
    rows = stored.gather(1, torch.where(taken, node, 0)[..., None].expand(-1, -1, stored.shape[2]))
    return torch.where(taken[..., None], rows, 0).view(values.dtype), status
