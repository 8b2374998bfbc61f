"""residual_probs, spelled plainly: norm((a p - b q)+) as a probability row. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._codes import Status
from ..._residual import residual


def residual_probs(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec_kernels.residual_probs`."""
    r = residual(
        target_logits, draft_logits, a, b, temperature, top_k, top_p, min_p,
        draft_temperature, draft_top_k, draft_top_p, draft_min_p, token_map, allowed, draft_ids,
    )  # fmt: skip
    empty = (r.status & Status.EMPTY_RESIDUAL) != 0
    probs = r.weight.double() / r.mass.double().clamp(min=1e-300)[:, None]
    probs = torch.where(empty[:, None], r.row.probs(), probs)
    probs = torch.where(r.row.bad[:, None], 0.0, probs)
    return probs.float(), r.mass, r.status.int()
