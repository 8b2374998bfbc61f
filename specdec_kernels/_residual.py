"""The one correction distribution, norm((a p - b q)+), in plain PyTorch; every lossless rule ends with a case of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _rows
from ._codes import Status
from ._rows import Distribution
from ._types import ResidualArguments
from ._vocabulary import Table, Vocabulary


class Residual(NamedTuple):
    """This rank's weights of one residual row a request, and what the rule for its edge cases needs."""

    row: Distribution  # the target's
    weight: Tensor  # float32 [batch, columns]: (a p - b q)+
    sums: tuple[Tensor, Tensor]  # [batch]: of the weights, float64; how many a draw can hit
    point: Tensor  # bool [batch]: q is a point mass
    at_point: Tensor  # bool [batch, columns]: its id
    plain: Tensor  # bool [batch]: q is zero everywhere
    status: Tensor  # int64 [batch]

    def settle(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mass, whether it is empty, status), from the sums of all ranks."""
        empty = (count == 0) & ~self.row.bad
        return total.float(), empty, self.status | torch.where(empty, Status.EMPTY_RESIDUAL, 0)


def residual(given: ResidualArguments, vocabulary: Vocabulary) -> Residual:
    """Weights (a p - b q)+ of each request; a bad draft row counts as no draft. One exchange, three with filters."""
    batch, device = given.target_logits.shape[0], given.target_logits.device
    target = _rows.parameters(batch, device, given.sampling)
    draft = _rows.parameters(batch, device, given.draft_sampling)
    rows = _rows.edited(vocabulary.pad(given.target_logits), given.allowed, given.edits, vocabulary.first)
    tables = [Table(rows, target)]
    if given.draft_logits is not None:
        drafts = given.draft_edits.apply(vocabulary.by_id(given.draft_logits, given.token_map))
        tables.append(Table(drafts, draft))
    (row, *others), _ = vocabulary.distributions(tables)()
    status = torch.where(target.bad, Status.BAD_SAMPLING, 0) | torch.where(row.bad, Status.BAD_TARGET, 0)

    # A draft id outside the vocabulary is no draft at all.
    ids = torch.full((batch,), -1, device=device) if given.draft_ids is None else given.draft_ids
    known = (ids >= 0) & (ids < vocabulary.size)
    status = status | torch.where(~known & (ids != -1), Status.BAD_ID, 0)
    columns = vocabulary.columns(device)
    at_point = (columns == ids[:, None]) & (columns < vocabulary.end) & known[:, None]
    q, point, plain = at_point.double(), known, ~known
    for drafted in others:
        status = status | torch.where(draft.bad, Status.BAD_SAMPLING, 0)
        status = status | torch.where(drafted.bad & ~draft.greedy, Status.BAD_DRAFT, 0)
        usable = ~draft.greedy & ~drafted.bad
        by_id = torch.where(usable[:, None], drafted.probs()[:, : vocabulary.widest], 0.0)
        q = torch.where(draft.greedy[:, None], q, by_id)
        point, plain = known & draft.greedy, torch.where(draft.greedy, ~known, drafted.bad)
    plain = plain | (given.b == 0)
    weight = (given.a.double()[:, None] * row.probs() - given.b.double()[:, None] * q).clamp(min=0)
    weight = torch.where(row.bad[:, None], 0.0, weight)
    sums = (weight.sum(1), (weight.float() >= _rows.TINY).sum(1))
    point = point & ~plain
    return Residual(row, weight.float(), sums, point, at_point & point[:, None], plain, status)
