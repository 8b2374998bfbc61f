"""The one correction distribution, norm((a p - b q)+), in plain PyTorch; every lossless rule ends with a case of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _rows
from ._codes import Status
from ._rows import Distribution
from ._types import ResidualArguments


class Residual(NamedTuple):
    """Weights of one residual row a request, and what the rule for its edge cases needs."""

    row: Distribution  # the target's
    weight: Tensor  # float32 [batch, vocab]: (a p - b q)+
    mass: Tensor  # float32 [batch]: its sum
    point: Tensor  # bool [batch]: q is a point mass at `ids`
    plain: Tensor  # bool [batch]: q is zero everywhere
    ids: Tensor  # int64 [batch]
    status: Tensor  # int64 [batch]


def residual(given: ResidualArguments) -> Residual:
    """Weights (a p - b q)+ of each request; a bad draft row counts as no draft."""
    (batch, vocab), device = given.target_logits.shape, given.target_logits.device
    target = _rows.parameters(batch, device, given.sampling)
    draft = _rows.parameters(batch, device, given.draft_sampling)
    status = torch.where(target.bad, Status.BAD_SAMPLING, 0)
    row = _rows.distribution(given.target_logits, target, given.allowed)
    status = status | torch.where(row.bad, Status.BAD_TARGET, 0)

    # A draft id outside the vocabulary is no draft at all.
    known = torch.zeros(batch, dtype=torch.bool, device=device)
    ids = torch.zeros(batch, dtype=torch.int64, device=device)
    if given.draft_ids is not None:
        known = (given.draft_ids >= 0) & (given.draft_ids < vocab)
        status = status | torch.where(~known & (given.draft_ids != -1), Status.BAD_ID, 0)
        ids = torch.where(known, given.draft_ids, 0)
    point = known
    q = torch.nn.functional.one_hot(ids, vocab).double() * known[:, None]
    plain = ~known
    if given.draft_logits is not None:
        drafted = _rows.distribution(given.draft_logits, draft)
        status = status | torch.where(draft.bad, Status.BAD_SAMPLING, 0)
        status = status | torch.where(drafted.bad & ~draft.greedy, Status.BAD_DRAFT, 0)
        over_ids = _rows.to_target_ids(drafted.probs(), given.token_map, vocab)
        usable = ~draft.greedy & ~drafted.bad
        q = torch.where(draft.greedy[:, None], q, torch.where(usable[:, None], over_ids, 0.0))
        point, plain = known & draft.greedy, torch.where(draft.greedy, ~known, drafted.bad)
    plain = plain | (given.b == 0)
    weight = (given.a.double()[:, None] * row.probs() - given.b.double()[:, None] * q).clamp(min=0)
    weight = torch.where(row.bad[:, None], 0.0, weight)
    mass = weight.sum(1).float()
    empty = ~(weight.float() >= _rows.TINY).any(1) & ~row.bad
    status = status | torch.where(empty, Status.EMPTY_RESIDUAL, 0)
    return Residual(row, weight.float(), mass, point & ~plain, plain, ids, status)
