"""tree_attention, spelled plainly: every row of the cache in order, and softmax under the dense mask."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._cache import Place, locate
from ..._codes import Status
from ..._trees import attends


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ancestors: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    scale: float,
    window: int,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec_kernels.tree_attention`; key and value are [page, slot, head, dim]."""
    mask, place, bad = _mask(key, ancestors, lengths, block_table, window)
    read = mask.any(1)
    keys, values = (
        torch.where(read[:, :, None, None], _rows(rows, place, scales), 0)
        for rows, scales in ((key, key_scale), (value, value_scale))
    )
    heads = query.unflatten(2, (key.shape[2], -1)).float()  # [batch, node, kv_head, group, dim]
    scores = torch.einsum("bnhgd,blhd->bnhgl", heads, keys) * scale
    scores = scores.masked_fill(~mask[:, :, None, None], float("-inf"))
    logsumexp = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(logsumexp == float("-inf"), 0, logsumexp)[..., None])
    output = torch.einsum("bnhgl,blhd->bnhgd", weights, values).flatten(2, 3).to(query.dtype)
    return output, logsumexp.flatten(2), torch.where(bad, Status.BAD_LAYOUT, 0).int()


def _rows(rows: Tensor, place: Place, scales: Tensor | None) -> Tensor:
    """Float32 [batch, position, head, dim]."""
    found = rows[place.page, place.slot].float()
    return found if scales is None else found * scales[:, None]


def _mask(
    key: Tensor, ancestors: Tensor, lengths: Tensor, block_table: Tensor | None, window: int
) -> tuple[Tensor, Place, Tensor]:
    """(bool [batch, node, position]: who attends what; where the positions lie; bool [batch]: bad requests)."""
    batch, nodes, _ = ancestors.shape
    num_pages, page_size = key.shape[:2]
    position = torch.arange(page_size * (1 if block_table is None else block_table.shape[1]), device=key.device)
    place = locate(block_table, page_size, num_pages, position.expand(batch, -1))

    node = torch.arange(nodes, device=key.device)
    bits = (ancestors[:, :, node >> 5] >> (node & 31).int()) & 1
    present = bits[:, :, 0] == 1  # the root is everybody's ancestor, but not that of padding
    depth = bits.sum(2) - 1
    width = torch.where(present, node + 1, 0).amax(1)
    bad = (lengths < 0) | (lengths > len(position) - width)
    start = torch.where(bad, 0, lengths.long())

    # Nobody reads what lies out of the root's window, rows of padding, and rows behind the last node.
    first = (start - window + 1).clamp(min=0) if window else torch.zeros_like(start)
    inside = (position >= first[:, None]) & (position < (start + width)[:, None])
    bad = bad | (inside & ~place.exists & (width > 0)[:, None]).any(1)
    row = (position - start[:, None]).clamp(0, nodes - 1)
    inside = inside & ((position < start[:, None]) | present.gather(1, row))

    request = torch.arange(batch, device=key.device)[:, None, None]
    mask = attends(ancestors, depth, start, torch.zeros_like(start), window, request, node[:, None], position)
    return mask & (inside & ~bad[:, None])[:, None] & present[:, :, None], place, bad
