"""advance_state, spelled plainly: every request's recurrence over its accepted tokens, one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._codes import Status


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
    request = torch.arange(batch, device=state.device)
    count, slot = num_accepted.long(), request if slots is None else slots.long()
    chain = torch.arange(1, nodes, device=state.device).expand(batch, -1)
    order = torch.nn.functional.pad(chain if path is None else path.long(), (1, 0))  # the root first
    depth = torch.arange(order.shape[1], device=state.device)
    used = (depth > 0) & (depth <= count[:, None])
    before = torch.nn.functional.pad(order, (1, 0))[:, :-1]
    strays = (used & ~((order > before) & (order < nodes))).any(1)
    acts = (count >= 0) & (slot != -1)
    refused = strays | (count >= order.shape[1]) | (slot < 0) | (slot >= state.shape[1])
    bad = (count < -1) | (acts & refused)
    acts = acts & ~bad
    status = torch.where(bad, Status.BAD_LAYOUT, 0).int()
    if batch == 0 or state.numel() == 0:
        return status

    keys = keys.float().repeat_interleave(heads // keys.shape[3], 3)
    values = values.float().repeat_interleave(heads // values.shape[3], 3)
    s = state[:, slot.clamp(0, state.shape[1] - 1)].float()  # [layers, batch, heads, d_k, d_v]
    for d in range(order.shape[1]):
        node = order[:, d].clamp(0, nodes - 1)
        k, v = keys[:, request, node], values[:, request, node]
        after = s
        if log_decay is not None:
            factor = log_decay[:, request, node].exp()
            after = after * (factor[..., None, None] if factor.dim() == 3 else factor[..., None])
        if beta is not None:
            v = beta[:, request, node][..., None] * (v - (k[..., None] * after).sum(-2))
        after = after + k[..., None] * v[..., None, :]
        s = torch.where((acts & (d <= count))[:, None, None, None], after, s)
    owner = torch.full((state.shape[1] + 1,), -1, device=state.device)  # of a slot; the last takes who has none
    owner = owner.scatter(0, torch.where(acts, slot, state.shape[1]), request)[:-1]
    written = s[:, owner.clamp(0)].to(state.dtype)
    state.copy_(torch.where((owner >= 0)[:, None, None, None], written, state))
    return status
