"""advance_window, spelled plainly: window and accepted inputs as one row, of which the end is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._accepted import steps, store


def advance_window(
    window: Tensor, inputs: Tensor, num_accepted: Tensor, path: Tensor | None, slots: Tensor | None
) -> Tensor:
    """See `specdec_kernels.advance_window`."""
    batch, nodes, width = inputs.shape[1], inputs.shape[2], window.shape[3]
    taken = steps(num_accepted, path, slots, nodes, window.shape[1])
    if batch == 0 or window.numel() == 0:
        return taken.status

    request = torch.arange(batch, device=window.device)
    order = taken.order.clamp(0, nodes - 1)
    new = inputs[:, request[:, None], order].transpose(2, 3)  # [layers, batch, channels, 1 + depth]
    row = torch.cat([window[:, taken.slot.clamp(0, window.shape[1] - 1)], new], 3)
    last = taken.accepted.clamp(0, order.shape[1] - 1)[:, None] + 1 + torch.arange(width, device=window.device)
    store(window, row.gather(3, last[:, None].expand(*row.shape[:3], -1)), taken)
    return taken.status
