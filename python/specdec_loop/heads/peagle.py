"""P-EAGLE: an EAGLE-3 head that drafts many positions in one forward, from masks behind the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .eagle3 import Eagle3Head
from .layers import Shared

MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # what configurations call the id


class PEagleHead(Eagle3Head):
    """The last pair's row reads the next token's logits, that of the k-th mask behind it those of the token k later.

    A mask is a token of the vocabulary beside a learned state. Masks see the text and the masks before them.
    """

    def __init__(self, config: Any, shared: Shared) -> None:
        """Make the head.

        Args:
            config: as of `Eagle3Head`, with the id of the mask: ``mask_token_id``, ``pard_token`` or ``ptd_token_id``.
            shared: what the target lends.

        Raises:
            ValueError: as of `Eagle3Head`; no mask.
        """
        super().__init__(config, shared)
        given = [value for name in MASKS if (value := getattr(config, name, None)) is not None]
        if not given:
            raise ValueError(f"PEagleHead: the configuration must have {' or '.join(MASKS)}, got none")
        self.mask_token_id = int(given[0])
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))

    def fuse_masked(self, hidden: Tensor, is_mask: Tensor) -> Tensor:
        """Features of pairs and masks: states ``[batch, rows, ..]`` of the target, the learned one where `is_mask`."""
        return self.fuse(torch.where(is_mask[:, :, None], self.mask_hidden, hidden.to(self.dtype)))
