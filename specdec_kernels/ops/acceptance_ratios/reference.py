"""acceptance_ratios, spelled plainly: min(1, p / q) and sum min(p, q) at each draft position. The definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _chains, _rows
from ..._codes import Status
from ..._types import RatioArguments
from ..._vocabulary import Table, Vocabulary


def acceptance_ratios(
    given: RatioArguments, *, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `specdec_kernels.acceptance_ratios`; a part of a `vocabulary` takes 2 exchanges, 4 with filters."""
    vocabulary = vocabulary or Vocabulary(given.target_logits.shape[-1])
    chains = _chains.chains(*given[:5])
    (batch, width), device = chains.ids.shape, given.draft_ids.device
    target = _rows.parameters(batch, device, given.sampling)
    draft = _rows.parameters(batch, device, given.draft_sampling)
    has_rows = chains.has_draft_rows()
    bad_sampling = target.bad | (draft.bad & chains.has_drafts(vocabulary.size)) if has_rows else target.bad
    status = torch.where(chains.bad, Status.BAD_LAYOUT, 0) | torch.where(bad_sampling, Status.BAD_SAMPLING, 0)

    request = torch.arange(batch, device=device)[:, None].expand(batch, width).flatten()

    def of_rows(table: Tensor) -> Tensor:  # without those of the bonus rows
        return chains.of_target_rows(table, width + 1, width)

    bits = None if given.allowed is None else of_rows(given.allowed)
    rows = vocabulary.pad(chains.target_rows(width).flatten(0, 1))
    rows = _rows.edited(rows, bits, given.edits.pick(of_rows), vocabulary.first)
    tables = [Table(rows, target.of_rows(request))]
    if has_rows:
        drafted = vocabulary.by_id(chains.draft_rows(width).flatten(0, 1), given.token_map)
        drafted = given.draft_edits.pick(of_rows).apply(drafted)
        tables.append(Table(drafted, draft.of_rows(request)))
    (row, *others), _ = vocabulary.distributions(tables)()

    outside = (chains.ids < -1) | (chains.ids >= vocabulary.size)
    columns = vocabulary.columns(device)
    at_x = (columns == chains.ids.flatten()[:, None]) & (columns < vocabulary.end)
    p, q = row.probs(), at_x.double()
    bad_draft = torch.zeros_like(row.bad)
    if others:
        point = draft.greedy[request]
        q = torch.where(point[:, None], q, others[0].probs()[:, : vocabulary.widest])
        bad_draft = others[0].bad & ~point
    sums = (torch.where(at_x, p, 0.0).sum(1), torch.where(at_x, q, 0.0).sum(1), torch.minimum(p, q).sum(1))
    px, qx, shared = (part.view(batch, width) for part in vocabulary.sum(*sums))

    # A position is used if there is an id at every one up to it.
    is_id = (chains.ids >= 0) & ~outside
    before = torch.nn.functional.pad(is_id.cumprod(1).bool(), (1, 0), value=True)[:, :-1] & ~chains.lost[:, None]
    used, bad, bad_draft = before & is_id, row.bad.view(batch, width), bad_draft.view(batch, width)
    good = used & ~bad & ~bad_draft
    for fault, bit in (
        (before & outside, Status.BAD_ID),
        (used & bad, Status.BAD_TARGET),
        (used & bad_draft, Status.BAD_DRAFT),
        (good & (qx == 0), Status.ZERO_DRAFT),
    ):
        status = status | torch.where(fault.any(1), bit, 0)
    accept = torch.where(qx > 0, px / qx.clamp(min=1e-300), 0.0).clamp(max=1.0)
    ratio, overlap = torch.where(good, accept, 0.0).float(), torch.where(good, shared, 0.0).float()
    return (
        _rows.of_active(given.sampling, ratio),
        _rows.of_active(given.sampling, overlap),
        _rows.of_active(given.sampling, status.int()),
    )
