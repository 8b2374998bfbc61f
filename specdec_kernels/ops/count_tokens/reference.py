"""count_tokens, spelled plainly: one token after another, each into its slot's table. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._codes import Status
from ..._edits import place_of


def count_tokens(
    counted_ids: Tensor, counts: Tensor, token_ids: Tensor, slots: Tensor | None, amount: int
) -> Tensor:  # fmt: skip
    """See `specdec_kernels.count_tokens`; `amount` is added to the count of each token, 1 marks it as the prompt's."""
    batch = token_ids.shape[0]
    status = torch.zeros(batch, dtype=torch.int32, device=token_ids.device)
    for b, tokens in enumerate(token_ids.tolist()):
        slot = b if slots is None else int(slots[b])
        if slot == -1:
            continue
        if not 0 <= slot < len(counted_ids):
            status[b] = Status.BAD_LAYOUT
            continue
        table = counted_ids[slot]
        for token in tokens:
            if not 0 <= token < 2**31:
                continue
            place = place_of(table, token)
            if place is None:
                status[b] = Status.BAD_LAYOUT
                continue
            table[place] = token
            counts[slot, place] = (counts[slot, place] | 1) if amount == 1 else counts[slot, place] + amount
    return status
