"""tree_from_marginals, spelled plainly: the best offer becomes a node, again and again. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._codes import Status

MAX_ID = 2**31 - 1


def _ranked(ids: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability, index) of each position's candidates, best first; what is none has -inf and comes last."""
    usable = (ids >= 0) & (ids <= MAX_ID) & ~logprobs.isnan()
    value = torch.where(usable, logprobs.clamp(max=0), -torch.inf)
    index = torch.arange(ids.shape[2], device=ids.device)
    mine, other = value[..., :, None], value[..., None, :]
    is_before = (other > mine) | ((other == mine) & (index < index[:, None]))
    repeated = ((ids[..., :, None] == ids[..., None, :]) & is_before).any(3)
    ranked = torch.where(repeated, -torch.inf, value).sort(dim=2, descending=True, stable=True)
    return ranked.values, ranked.indices


def tree_from_marginals(
    candidate_ids: Tensor, logprobs: Tensor, num_nodes: int, root_ids: Tensor | None, max_nodes: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.tree_from_marginals`."""
    batch, _, width = candidate_ids.shape
    device = candidate_ids.device
    ids = candidate_ids.long()
    limit = torch.full((batch,), num_nodes, device=device) if max_nodes is None else max_nodes.clamp(max=num_nodes)
    is_bad_id = ((ids < -1) | (ids > MAX_ID)).flatten(1).any(1)
    is_bad_logprob = ((ids >= 0) & (ids <= MAX_ID) & ~(logprobs <= 1)).flatten(1).any(1)
    status = Status.BAD_ID * is_bad_id + Status.BAD_DRAFT * is_bad_logprob

    # One row and one column without candidates: below the last position, and behind the last rank.
    values, indices = _ranked(ids, logprobs)
    value = pad(values, (0, 1, 0, 1), value=-torch.inf).flatten(1)
    index = pad(indices, (0, 1, 0, 1)).flatten(1)
    row = width + 1

    parents = torch.full((batch, num_nodes), -1, device=device)
    source = torch.full((batch, num_nodes), -1, device=device)
    # Of the nodes: sum of their path.
    score = torch.full((batch, num_nodes), -torch.inf, dtype=torch.float32, device=device)
    score[:, 0] = 0
    place = torch.zeros((batch, num_nodes), dtype=torch.int64, device=device)  # of each node's next child in `value`
    for node in range(1, num_nodes):
        offer = score + value.gather(1, place)
        parent = offer.argmax(1, keepdim=True)  # the first of equal ones
        best = offer.gather(1, parent)
        found = (best > -torch.inf) & (node < limit[:, None])
        at = place.gather(1, parent)
        chosen = at // row * width + index.gather(1, at)
        parents[:, node] = torch.where(found, parent, -1)[:, 0]
        source[:, node] = torch.where(found, chosen, -1)[:, 0]
        score[:, node] = torch.where(found, best, -torch.inf)[:, 0]
        place[:, node] = torch.where(found, (at // row + 1) * row, 0)[:, 0]
        place.scatter_(1, parent, torch.where(found, at + 1, at))

    flat = pad(ids.flatten(1), (0, 1))  # never empty
    token_ids = torch.where(source >= 0, flat.gather(1, source.clamp(min=0)), -1)
    if root_ids is not None:
        token_ids[:, 0] = root_ids
    status = torch.where(limit > 1, status, 0)
    return token_ids.to(candidate_ids.dtype), parents.int(), source.int(), status.int()
