"""EAGLE-1 and EAGLE-2: one Llama layer without an input norm behind a map of [embedding; feature]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layers import FeatureHead, Residual, Shared


class EagleHead(FeatureHead):
    """Continues the target's last normed states; the target's output matrix reads them."""

    def __init__(self, config: Any, shared: Shared, *, bias: bool = True) -> None:
        """Make the head.

        Args:
            config: a Llama configuration of one layer.
            shared: what the target lends.
            bias: of `fc`.
        """
        super().__init__(config, shared)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList([Residual(config, config.hidden_size)])

    def step(
        self, embedded: Tensor, features: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Map, then the layer."""
        x = self.fc(torch.cat([embedded, features], -1))
        out: Tensor = self.layers[0].finish(x, x, rotary, mask, cache)  # type: ignore[operator]
        return out
