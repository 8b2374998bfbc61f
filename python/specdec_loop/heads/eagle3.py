"""EAGLE-3 and 3.1: features of three depths, a layer that sees [embedding; feature], and a vocabulary of its own."""

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


class LaterLayer(Residual):
    """A Llama layer behind the first one."""

    def __init__(self, config: Any, layer: int) -> None:
        """Take the sizes from a Llama configuration, and the layer's number."""
        super().__init__(config, config.hidden_size, layer)
        self.input_layernorm = norm(config)


class Eagle3Head(FeatureHead):
    """Fuses a low, a middle and a high state to a feature, and goes on with features of its own.

    EAGLE-3.1 adds norms: `fc_norm` of each state, or `norm_before_fc` of all states together, before they are fused;
    `norm_output`: what the head goes on with is normed. `norm_before_residual`: the residual is the normed feature.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Any, shared: Shared) -> None:
        """Make the head.

        Args:
            config: a Llama configuration with ``draft_vocab_size``; ``target_hidden_size`` where the target is wider;
                ``qk_norm`` where the layers are Qwen3's; the norms above, each a bool; and
                ``eagle_aux_hidden_state_layer_ids``, there or in ``eagle_config``, may name the levels.
            shared: what the target lends.

        Raises:
            ValueError: the last layer among the levels, norms that exclude each other, or a head without `fc`.
        """
        super().__init__(config, shared)
        options = getattr(config, "eagle_config", None) or {}
        self.levels = _levels(config, options, shared.layers)
        before_fc = options.get("norm_before_fc", getattr(config, "norm_before_fc", False))
        per_state = getattr(config, "fc_norm", False)
        if before_fc and per_state:
            raise ValueError("Eagle3Head: norm_before_fc and fc_norm exclude each other, got both")
        if not options.get("use_aux_hidden_state", True):
            raise ValueError("Eagle3Head: use_aux_hidden_state must be true, got false: such a head has no fc")
        draft_vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
        width = getattr(config, "target_hidden_size", None) or config.hidden_size
        count = len(self.levels)
        self.input_norm = norm(config, count * width) if before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(norm(config, width) for _ in range(count if per_state else 0))
        self.fc = nn.Linear(count * width, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        later = {str(number): LaterLayer(config, number) for number in range(1, config.num_hidden_layers)}
        self.layers = nn.ModuleDict(later)
        self.norm = norm(config)
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))
        self.norm_output = bool(getattr(config, "norm_output", False))
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def choose(self, target_ids: Tensor) -> None:
        """Draft these ids alone: int64 ``[draft_vocab]``, rising."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()[target_ids] = True
        self.map_tokens(self.d2t, "choose")

    def fuse(self, hidden: Tensor) -> Tensor:
        """Map the states to one feature."""
        states = self.input_norm(super().fuse(hidden))
        if self.fc_norm:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: Tensor = self.fc(states)
        return out

    def logits(self, features: Tensor) -> Tensor:
        """Read the normed feature with the head's own matrix."""
        out: Tensor = self.lm_head(features if self.norm_output else self.norm(features))
        return out

    def step(
        self, embedded: Tensor, features: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """The layers."""
        first = self.midlayer
        feature = first.hidden_norm(features)
        seen = torch.cat([first.input_layernorm(embedded), feature], -1)
        x = first.finish(feature if self.norm_before_residual else features, seen, rotary, mask, cache)
        for layer in self.layers.values():
            x = layer.finish(x, layer.input_layernorm(x), rotary, mask, cache)  # type: ignore[operator]
        return self.norm(x) if self.norm_output else x


def _levels(config: Any, options: dict[str, Any], last: int) -> tuple[int, ...]:
    """Which of the target's states are fused."""
    name = "eagle_aux_hidden_state_layer_ids"
    named = options.get(name) or getattr(config, name, None)
    # The last layer's is handed out behind its norm alone; such a head reads it before.
    if named and not all(-1 <= level < last for level in named):
        raise ValueError(f"Eagle3Head: {name} must be in [-1, {last}), got {list(named)}")
    return tuple(named or (2, last // 2, last - 3))
