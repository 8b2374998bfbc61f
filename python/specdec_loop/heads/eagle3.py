"""EAGLE-3: features of three depths, a layer that sees [embedding; feature], and a vocabulary of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layers import FeatureHead, Residual, Shared, norm


class MidLayer(Residual):
    """A Llama layer whose attention sees the normed embedding beside the normed feature."""

    def __init__(self, config: Any) -> None:
        """Take the sizes from a Llama configuration."""
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm, self.input_layernorm = norm(config), norm(config)


class Eagle3Head(FeatureHead):
    """Fuses a low, a middle and a high state to a feature, and goes on with features of its own."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Any, shared: Shared) -> None:
        """Make the head.

        Args:
            config: a Llama configuration of one layer with ``draft_vocab_size``; ``target_hidden_size`` where the
                target is wider; ``eagle_config`` may name the levels.
            shared: what the target lends.

        Raises:
            ValueError: a layout of other norms; the last layer among the levels.
        """
        super().__init__(config, shared)
        last = shared.layers
        named = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
        self.levels = tuple(named or (2, last // 2, last - 3))
        if named and max(named) >= last:  # transformers hands it out behind its norm alone, such a head reads it before
            raise ValueError(f"Eagle3Head: eagle_aux_hidden_state_layer_ids must be below {last}, got {named}")
        for other in ("norm_before_residual", "norm_output"):
            if getattr(config, other, False):
                raise ValueError(f"Eagle3Head: {other} must be false, got true: this layout is not known here")
        draft_vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
        width = getattr(config, "target_hidden_size", None) or config.hidden_size
        self.fc = nn.Linear(len(self.levels) * width, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = norm(config)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def choose(self, target_ids: Tensor) -> None:
        """Draft these ids alone: int64 ``[draft_vocab]``, rising."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()[target_ids] = True
        self.map_tokens()

    def map_tokens(self) -> None:
        """Follow `d2t`: column i of the logits is target id i + d2t[i]."""
        self.token_map = (torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t).int()

    def fuse(self, hidden: Tensor) -> Tensor:
        """Map the states to one feature."""
        out: Tensor = self.fc(super().fuse(hidden))
        return out

    def logits(self, features: Tensor) -> Tensor:
        """Read the normed feature with the head's own matrix."""
        out: Tensor = self.lm_head(self.norm(features))
        return out

    def step(
        self, embedded: Tensor, features: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """The layer."""
        layer = self.midlayer
        seen = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(features)], -1)
        return layer.finish(features, seen, rotary, mask, cache)
