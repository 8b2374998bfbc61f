"""A head for multi-token prediction as in DeepSeek-V3, with a Llama layer as its block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layers import FeatureHead, Residual, Shared, norm


class MtpHead(FeatureHead):
    """h' = block(M [norm(embedding); norm(feature)]); the target's output matrix reads the normed h'."""

    def __init__(self, config: Any, shared: Shared) -> None:
        """Take the sizes from a Llama configuration; the target lends embedding and output matrix."""
        super().__init__(config, shared)
        self.enorm, self.hnorm = norm(config), norm(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm = norm(config)
        self.block = Residual(config, config.hidden_size)
        self.norm = norm(config)

    def logits(self, features: Tensor) -> Tensor:
        """Read the normed feature."""
        return super().logits(self.norm(features))

    def step(
        self, embedded: Tensor, features: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Norm, join, block."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(features)], -1))
        return self.block.finish(x, self.input_layernorm(x), rotary, mask, cache)
