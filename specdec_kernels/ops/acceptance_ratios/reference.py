"""acceptance_ratios, spelled plainly: min(1, p / q) and sum min(p, q) at each draft position. The definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _chains, _rows
from ..._codes import Status
from ..._types import Sampling


def acceptance_ratios(
    draft_ids: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    cu_draft: Tensor | None,
    max_draft: int,
    sampling: Sampling,
    draft_sampling: Sampling,
    token_map: Tensor | None,
    allowed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec_kernels.acceptance_ratios`."""
    chains = _chains.chains(draft_ids, target_logits, draft_logits, cu_draft, max_draft)
    batch, device, vocab = chains.ids.shape[0], draft_ids.device, target_logits.shape[-1]
    target = _rows.parameters(batch, device, sampling)
    draft = _rows.parameters(batch, device, draft_sampling)
    has_rows = chains.has_draft_rows()
    bad_sampling = target.bad | (draft.bad & chains.has_drafts(vocab)) if has_rows else target.bad
    status = torch.where(chains.bad, Status.BAD_LAYOUT, 0) | torch.where(bad_sampling, Status.BAD_SAMPLING, 0)

    ratio = torch.zeros(batch, max_draft, device=device)
    overlap = torch.zeros(batch, max_draft, device=device)
    used = ~chains.lost
    for i in range(max_draft):
        x = chains.ids[:, i]
        outside = (x < -1) | (x >= vocab)
        status = status | torch.where(used & outside, Status.BAD_ID, 0)
        used = used & (x >= 0) & ~outside
        x = torch.where(used, x, 0)
        row = _rows.distribution(
            chains.target_at(i), target, None if allowed is None else chains.allowed_at(allowed, i)
        )
        q = torch.nn.functional.one_hot(x, vocab).double()
        bad_draft = torch.zeros_like(used)
        if has_rows:
            drafted = _rows.distribution(chains.draft_at(i), draft)
            over_ids = _rows.to_target_ids(drafted.probs(), token_map, vocab)
            q = torch.where(draft.greedy[:, None], q, over_ids)
            bad_draft = drafted.bad & ~draft.greedy
        p = row.probs()
        px, qx = (t.gather(1, x[:, None]).squeeze(1) for t in (p, q))
        status = status | torch.where(used & row.bad, Status.BAD_TARGET, 0)
        status = status | torch.where(used & bad_draft, Status.BAD_DRAFT, 0)
        good = used & ~row.bad & ~bad_draft
        status = status | torch.where(good & (qx == 0), Status.ZERO_DRAFT, 0)
        accept = torch.where(qx > 0, px / qx.clamp(min=1e-300), 0.0).clamp(max=1.0)
        ratio[:, i] = torch.where(good, accept, 0.0).float()
        overlap[:, i] = torch.where(good, torch.minimum(p, q).sum(1), 0.0).float()
    return ratio, overlap, status.int()
