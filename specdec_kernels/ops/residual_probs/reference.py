"""residual_probs, spelled plainly: norm((a p - b q)+) as a probability row. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _rows
from ..._codes import Status
from ..._residual import residual
from ..._types import ResidualArguments


def residual_probs(given: ResidualArguments) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec_kernels.residual_probs`."""
    r = residual(given)
    empty = (r.status & Status.EMPTY_RESIDUAL) != 0
    probs = r.weight.double() / r.mass.double().clamp(min=1e-300)[:, None]
    probs = torch.where(empty[:, None], r.row.probs(), probs)
    probs = torch.where(r.row.bad[:, None], 0.0, probs)
    return (
        _rows.of_active(given.sampling, probs.float()),
        _rows.of_active(given.sampling, r.mass),
        _rows.of_active(given.sampling, r.status.int()),
    )
