"""Which nodes of a step enter the state of each request: what ops that advance a state in place have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._check import ID_DTYPES, Checker, fail
from ._codes import Status


class Steps(NamedTuple):
    """What happens to each request."""

    order: Tensor  # int64 [batch, 1 + depth]: the root, then the nodes of the path
    accepted: Tensor  # int64 [batch]: how many nodes behind the root
    slot: Tensor  # int64 [batch]
    acts: Tensor  # bool [batch]
    status: Tensor  # int32 [batch]


def check_steps(
    check: Checker,
    name: str,
    state: Tensor,
    num_accepted: Tensor,
    path: Tensor | None,
    slots: Tensor | None,
    batch: int,
) -> None:
    """The arguments that name requests, nodes and slots, and the slots of the state, which the op writes."""
    if 0 in state.stride() and any(n > 1 and not s for n, s in zip(state.shape, state.stride(), strict=True)):
        fail(check.op, name, "of slots with memory of their own, not expanded", f"strides {list(state.stride())}")
    check.vector("num_accepted", num_accepted, (torch.int32,), batch)
    if path is not None:
        check.dense("path", path, ID_DTYPES, (batch, "max_depth + 1"))
    if slots is not None:
        check.vector("slots", slots, (torch.int32,), batch)
    elif state.shape[1] < batch:
        fail(check.op, "slots", "given where the state has fewer slots than requests", None)


def steps(num_accepted: Tensor, path: Tensor | None, slots: Tensor | None, nodes: int, num_slots: int) -> Steps:
    """A request with a count, slot or path that is not possible is flagged, and does not act."""
    batch, device = len(num_accepted), num_accepted.device
    count, slot = num_accepted.long(), torch.arange(batch, device=device) if slots is None else slots.long()
    chain = torch.arange(1, nodes, device=device).expand(batch, -1)
    order = pad(chain if path is None else path.long(), (1, 0))  # the root first
    depth = torch.arange(order.shape[1], device=device)
    used = (depth > 0) & (depth <= count[:, None])
    before = pad(order, (1, 0))[:, :-1]
    strays = (used & ~((order > before) & (order < nodes))).any(1)
    acts = (count >= 0) & (slot != -1)
    refused = strays | (count >= order.shape[1]) | (slot < 0) | (slot >= num_slots)
    bad = (count < -1) | (acts & refused)
    return Steps(order, count, slot, acts & ~bad, torch.where(bad, Status.BAD_LAYOUT, 0).int())


def store(state: Tensor, made: Tensor, taken: Steps) -> None:
    """Write what was made, ``[layers, batch, ...]``, to the slots ``[layers, slots, ...]`` of who acts."""
    slots, request = state.shape[1], torch.arange(len(taken.slot), device=state.device)
    owner = torch.full((slots + 1,), -1, device=state.device)  # of a slot; the last takes who has none
    owner = owner.scatter(0, torch.where(taken.acts, taken.slot, slots), request)[:-1]
    is_written = (owner >= 0).view(-1, *[1] * (state.dim() - 2))
    state.copy_(torch.where(is_written, made[:, owner.clamp(0)].to(state.dtype), state))
