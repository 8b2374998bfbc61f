"""advance_state, spelled plainly: every request's recurrence over its accepted tokens, one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._accepted import steps, store


def advance_state(
    state: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    num_accepted: Tensor,
    path: Tensor | None,
    slots: Tensor | None,
) -> Tensor:
    """See `specdec_kernels.advance_state`."""
    batch, nodes, heads = keys.shape[1], keys.shape[2], state.shape[2]
    taken = steps(num_accepted, path, slots, nodes, state.shape[1])
    if batch == 0 or state.numel() == 0:
        return taken.status

    request = torch.arange(batch, device=state.device)
    keys = keys.float().repeat_interleave(heads // keys.shape[3], 3)
    values = values.float().repeat_interleave(heads // values.shape[3], 3)
    s = state[:, taken.slot.clamp(0, state.shape[1] - 1)].float()  # [layers, batch, heads, d_k, d_v]
    for d in range(taken.order.shape[1]):
        node = taken.order[:, d].clamp(0, nodes - 1)
        k, v = keys[:, request, node], values[:, request, node]
        after = s
        if log_decay is not None:
            factor = log_decay[:, request, node].exp()
            after = after * (factor[..., None, None] if factor.dim() == 3 else factor[..., None])
        if beta is not None:
            v = beta[:, request, node][..., None] * (v - (k[..., None] * after).sum(-2))
        after = after + k[..., None] * v[..., None, :]
        s = torch.where((taken.acts & (d <= taken.accepted))[:, None, None, None], after, s)
    store(state, s, taken)
    return taken.status
