"""The one correction distribution, norm((a p - b q)+), in plain PyTorch; every lossless rule ends with a case of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _rows
from ._codes import Status
from ._rows import Distribution


class Residual(NamedTuple):
    """Weights of one residual row a request, and what the rule for its edge cases needs."""

    row: Distribution  # the target's
    weight: Tensor  # float32 [batch, vocab]: (a p - b q)+
    mass: Tensor  # float32 [batch]: its sum
    point: Tensor  # bool [batch]: q is a point mass at `ids`
    plain: Tensor  # bool [batch]: q is zero everywhere
    ids: Tensor  # int64 [batch]
    status: Tensor  # int64 [batch]


def residual(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    a: Tensor,
    b: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    draft_temperature: Tensor | None,
    draft_top_k: Tensor | None,
    draft_top_p: Tensor | None,
    draft_min_p: Tensor | None,
    token_map: Tensor | None,
    allowed: Tensor | None,
    draft_ids: Tensor | None,
) -> Residual:
    """Weights (a p - b q)+ of each request; a bad draft row counts as no draft."""
    batch, vocab = target_logits.shape
    device = target_logits.device
    target = _rows.parameters(batch, device, temperature, top_k, top_p, min_p)
    draft = _rows.parameters(batch, device, draft_temperature, draft_top_k, draft_top_p, draft_min_p)
    status = torch.where(target.bad, Status.BAD_SAMPLING, 0)
    row = _rows.distribution(target_logits, target, allowed)
    status = status | torch.where(row.bad, Status.BAD_TARGET, 0)

    # A draft id outside the vocabulary is no draft at all.
    known = torch.zeros(batch, dtype=torch.bool, device=device)
    ids = torch.zeros(batch, dtype=torch.int64, device=device)
    if draft_ids is not None:
        known = (draft_ids >= 0) & (draft_ids < vocab)
        status = status | torch.where(~known & (draft_ids != -1), Status.BAD_ID, 0)
        ids = torch.where(known, draft_ids, 0)
    point = known
    q = torch.nn.functional.one_hot(ids, vocab).double() * known[:, None]
    plain = ~known
    if draft_logits is not None:
        drafted = _rows.distribution(draft_logits, draft)
        status = status | torch.where(draft.bad, Status.BAD_SAMPLING, 0)
        status = status | torch.where(drafted.bad & ~draft.greedy, Status.BAD_DRAFT, 0)
        over_ids = _rows.to_target_ids(drafted.probs(), token_map, vocab)
        usable = ~draft.greedy & ~drafted.bad
        q = torch.where(draft.greedy[:, None], q, torch.where(usable[:, None], over_ids, 0.0))
        point, plain = known & draft.greedy, torch.where(draft.greedy, ~known, drafted.bad)
    plain = plain | (b == 0)
    weight = (a.double()[:, None] * row.probs() - b.double()[:, None] * q).clamp(min=0)
    weight = torch.where(row.bad[:, None], 0.0, weight)
    mass = weight.sum(1).float()
    empty = ~(weight.float() >= _rows.TINY).any(1) & ~row.bad
    status = status | torch.where(empty, Status.EMPTY_RESIDUAL, 0)
    return Residual(row, weight.float(), mass, point & ~plain, plain, ids, status)
