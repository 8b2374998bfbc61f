"""token_logprobs, spelled plainly: sort what each row keeps. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import _rows
from ..._codes import Status
from ..._edits import RowEdits
from ..._types import Sampling

_INF = float("inf")


def token_logprobs(
    logits: Tensor, token_ids: Tensor, top: int, sampling: Sampling, allowed: Tensor | None, edits: RowEdits
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.token_logprobs`; raw: without sampling parameters, mask and edits."""
    rows, vocab = logits.shape
    parameter = _rows.parameters(rows, logits.device, sampling)
    row = _rows.distribution(_rows.edited(logits, allowed, edits), parameter)
    kept = torch.where(row.kept & ~row.bad[:, None], row.logits, -_INF)

    outside = (token_ids < -1) | (token_ids >= vocab)
    has = (token_ids >= 0) & ~outside
    own = kept.gather(1, token_ids.long().clamp(0, vocab - 1)[:, None])
    rank = 1 + (kept > own).sum(1)

    ordered = kept.sort(dim=1, descending=True, stable=True)
    best, ids = (pad(part[:, :top], (0, max(top - vocab, 0))) for part in ordered)
    there = (best > -_INF) & (torch.arange(top, device=logits.device) < vocab)

    status = torch.where(parameter.bad, Status.BAD_SAMPLING, 0)
    status = status | torch.where(row.bad, Status.BAD_TARGET, 0) | torch.where(outside, Status.BAD_ID, 0)
    return (
        _rows.of_active(sampling, torch.where(has, row.logprob(own)[:, 0], 0.0)),
        _rows.of_active(sampling, torch.where(has & ~row.bad, rank, 0).int()),
        _rows.of_active(sampling, torch.where(there, ids, -1).to(token_ids.dtype), -1),
        _rows.of_active(sampling, torch.where(there, row.logprob(best), -_INF)),
        _rows.of_active(sampling, status.int()),
    )
