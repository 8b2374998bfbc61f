"""token_logprobs, spelled plainly: sort what each row keeps. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _rows, _vocabulary
from ..._codes import Status
from ..._edits import RowEdits
from ..._types import Sampling
from ..._vocabulary import Table, Vocabulary

_INF = float("inf")


def token_logprobs(
    logits: Tensor, token_ids: Tensor, top: int, sampling: Sampling, allowed: Tensor | None, edits: RowEdits
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.token_logprobs`; raw: without sampling parameters, mask and edits."""
    return score(Vocabulary(logits.shape[1]), logits, token_ids, top, sampling, allowed, edits)


def score(
    vocabulary: Vocabulary, logits: Tensor, token_ids: Tensor, top: int, sampling: Sampling, allowed: Tensor | None,
    edits: RowEdits,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same where this rank holds a part of the vocabulary: 2 exchanges, 4 with filters."""
    parameter = _rows.parameters(len(logits), logits.device, sampling)
    outside = (token_ids < -1) | (token_ids >= vocabulary.size)
    has = (token_ids >= 0) & ~outside
    table = Table(_rows.edited(vocabulary.pad(logits), allowed, edits, vocabulary.first), parameter)
    mine = has & (token_ids >= vocabulary.first) & (token_ids < vocabulary.end)
    column = torch.where(mine, token_ids.long() - vocabulary.first, 0)[:, None]
    (row,), (found,) = vocabulary.distributions(
        [table], torch.where(mine, table.logits.gather(1, column)[:, 0], -_INF)
    )()  # fmt: skip
    own = found.amax(0)
    is_kept = torch.where(row.greedy, token_ids == row.argmax, own >= row.threshold)
    own = torch.where(has & is_kept, own, -_INF)[:, None]

    kept = torch.where(row.kept & ~row.bad[:, None], row.logits, -_INF)
    larger = (kept > own).sum(1, dtype=torch.int32)
    best, ids, _ = _vocabulary.best(kept, vocabulary.columns(logits.device), kept, top)
    ahead, best, ids = vocabulary.send(larger, best, ids)()
    rank = 1 + _vocabulary.added(ahead)
    listed = _vocabulary.winner(best, ids, best)
    there = listed.ids >= 0

    status = torch.where(parameter.bad, Status.BAD_SAMPLING, 0)
    status = status | torch.where(row.bad, Status.BAD_TARGET, 0) | torch.where(outside, Status.BAD_ID, 0)
    return (
        _rows.of_active(sampling, torch.where(has, row.logprob(own)[:, 0], 0.0)),
        _rows.of_active(sampling, torch.where(has & ~row.bad, rank, 0).int()),
        _rows.of_active(sampling, listed.ids.to(token_ids.dtype), -1),
        _rows.of_active(sampling, torch.where(there, row.logprob(listed.logit), -_INF)),
        _rows.of_active(sampling, status.int()),
    )
