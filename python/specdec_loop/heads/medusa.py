"""Medusa's heads, and those of Stern et al.: each predicts one more token from the same state."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .layers import Shared


class ResBlock(nn.Module):
    """x + silu(linear(x)); it begins as the identity."""

    def __init__(self, size: int) -> None:
        """Keep the size of a state."""
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Add the non-linear map."""
        return x + silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Head i reads the target's last state at token t and predicts token t + 2 + i.

    The names of its tensors are those of the published files: ``i.j.linear`` is block j of head i, and ``i.layers`` its
    output matrix. Heads without output matrices of their own use the target's (Stern et al.).
    """

    def __init__(self, shared: Shared, *, size: int, vocab: int, heads: int, layers: int = 1, own_output: bool) -> None:
        """Make the heads.

        Args:
            shared: what the target lends.
            size: of a state.
            vocab: ids.
            heads: tokens predicted beyond the next one.
            layers: blocks of a head.
            own_output: each head has an output matrix.
        """
        super().__init__()
        for _ in range(heads):
            blocks: list[nn.Module] = [ResBlock(size) for _ in range(layers)]
            output = [nn.Linear(size, vocab, bias=False)] if own_output else []
            self.append(nn.Sequential(*blocks, *output))
        self._shared, self.own_output = (shared,), own_output

    @property
    def networks(self) -> tuple[nn.Module, nn.Module]:
        """See `FeatureHead`."""
        return self, self._shared[0].output

    def forward(self, states: Tensor, heads: int | None = None) -> Tensor:
        """Logits ``[.., heads, vocab]`` of the first heads, None: of all, from states ``[.., size]``."""
        states = states.to(next(self.parameters()).dtype)
        out = torch.stack([head(states) for head in islice(self, heads)], -2)
        if not self.own_output:
            out = self._shared[0].output(out)
        return out
