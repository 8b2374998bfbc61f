"""tree_from_sequences, spelled plainly: a prefix is a node, kept where it occurs first. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._codes import Status


def tree_from_sequences(token_ids: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.tree_from_sequences`."""
    device = token_ids.device
    ids = torch.nn.functional.pad(token_ids.long(), (0, 0, 0, 1), value=-1)  # one empty sequence: never none at all
    batch, sequences, length = ids.shape
    status = torch.where((ids < -1).flatten(1).any(1), Status.BAD_ID, 0)
    given = (ids >= 0).long().cumprod(2).bool()
    equal = (ids[:, :, None] == ids[:, None, :]) & given[:, :, None] & given[:, None, :]
    same_prefix = equal.long().cumprod(3)  # [batch, sequence, other, length]
    first = same_prefix.argmax(2)  # the first sequence with this prefix
    kept = given & (first == torch.arange(sequences, device=device)[:, None])

    # Nodes in the order (sequence, place); a prefix comes before what it is a prefix of.
    number = torch.where(kept, kept.flatten(1).cumsum(1).view_as(kept), 0)
    node = number.gather(1, first)  # of every place, kept or not
    parent = torch.nn.functional.pad(node, (1, 0))[:, :, :length]
    slot = torch.where(kept & (number < num_nodes), number, num_nodes).flatten(1)

    def place(values: Tensor) -> Tensor:
        out = torch.full((batch, num_nodes + 1), -1, device=device)
        return out.scatter(1, slot, values.flatten(1))[:, :num_nodes].contiguous()

    source = torch.arange(sequences * length, device=device).expand(batch, -1)
    return place(ids).to(token_ids.dtype), place(parent).int(), place(source).int(), status.int()
