"""allocate_drafts, spelled plainly: the most probable drafts of a batch, as many as pay. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._codes import Status

# Products are summed as integers of this unit: every order of summation then gives the same bits.
ONE = 2.0**32


def allocate_drafts(
    draft_ids: Tensor,
    confidence: Tensor,
    active: Tensor | None,
    cost: Tensor | None,
    budget: int,
    compare_all: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.allocate_drafts`."""
    batch, draft = draft_ids.shape
    capacity = min(budget, batch * draft)
    device = draft_ids.device
    runs = torch.ones(batch, dtype=torch.bool, device=device) if active is None else active
    good = (confidence >= 0) & (confidence <= 1)
    usable = (runs[:, None] & (draft_ids >= 0) & good).int().cumprod(1).bool()

    product = torch.ones(batch, dtype=torch.float32, device=device)
    products = torch.zeros(batch, draft, dtype=torch.float32, device=device)
    for i in range(draft):
        product = torch.where(usable[:, i], product * confidence[:, i], 0.0)
        products[:, i] = product

    # Depth before request: a stable sort then puts the shallower of equal drafts first, then the lower request.
    ranked, order = products.t().flatten().sort(descending=True, stable=True)
    ranked = ranked[:capacity]
    paying = ranked > 0
    if cost is not None:
        value = values(ranked, runs, cost)
        if compare_all:
            value[1:].masked_fill_(~paying, -torch.inf)
            count = (value == value.max()).cumsum(0).eq(0).sum()
        else:
            count = (paying & (value[1:] > value[:-1])).int().cumprod(0).sum()
    else:
        count = paying.sum()

    rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=device))
    kept = (rank < count).view(draft, batch).t()
    num_draft = kept.sum(1).int()
    cu_draft = torch.cat([num_draft.new_zeros(1), num_draft.cumsum(0).int()])
    kept = kept.flatten()
    place = torch.where(kept, kept.cumsum(0) - 1, capacity)

    def flat(of: Tensor) -> Tensor:
        return of.new_full((capacity + 1,), -1).scatter(0, place, of)[:capacity].contiguous()

    source = torch.arange(batch * draft, dtype=torch.int32, device=device)
    status = status_of(draft_ids, usable, runs)
    return flat(draft_ids.flatten()), cu_draft, flat(source), num_draft, status


def values(ranked: Tensor, runs: Tensor, cost: Tensor) -> Tensor:
    """Expected tokens over cost with the n best drafts, for each n; -inf where the cost is not positive."""
    gained = torch.cat([runs.sum()[None] * int(ONE), (ranked * ONE).long()]).cumsum(0)
    cost = cost[: len(gained)].double()
    return torch.where(cost > 0, gained.double() / cost, -torch.inf)


def status_of(draft_ids: Tensor, usable: Tensor, runs: Tensor) -> Tensor:
    """The fault that ended a draft, if one did."""
    end = usable.sum(1, keepdim=True)
    ids = torch.cat([draft_ids, draft_ids.new_full((len(draft_ids), 1), -1)], 1).gather(1, end)[:, 0]
    fault = torch.where(ids < 0, Status.BAD_ID, Status.BAD_DRAFT)
    return torch.where(runs & (ids != -1), fault, 0).int()
