"""residual_probs, spelled plainly: norm((a p - b q)+) as a probability row. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _rows
from ..._residual import residual
from ..._types import ResidualArguments
from ..._vocabulary import Vocabulary


def residual_probs(
    given: ResidualArguments, *, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `specdec_kernels.residual_probs`; a part of a `vocabulary` takes 2 exchanges, 4 with filters."""
    vocabulary = vocabulary or Vocabulary(given.target_logits.shape[-1])
    r = residual(given, vocabulary)
    mass, empty, status = r.settle(*vocabulary.sum(*r.sums))
    probs = r.weight.double() / mass.double().clamp(min=1e-300)[:, None]
    probs = torch.where(empty[:, None], r.row.probs(), probs)
    probs = torch.where(r.row.bad[:, None], 0.0, probs)[:, : given.target_logits.shape[1]]
    return (
        _rows.of_active(given.sampling, probs.float()),
        _rows.of_active(given.sampling, mass),
        _rows.of_active(given.sampling, status.int()),
    )
