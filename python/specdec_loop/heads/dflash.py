"""DFlash: a few layers that draft a whole block at once, from mask tokens and the target's features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import grouped_attention
from .layers import Attention, FeatureHead, Residual, Shared, norm, rotate


class BlockAttention(Attention):
    """Attention without order in a block; the keys of features come from the same matrices as those of its tokens."""

    has_norms = True

    def write(self, x: Tensor, rotary: tuple[Tensor, ...], cache: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values of ``[batch, count, width]`` to the cache; all that it holds."""
        shape = (*x.shape[:2], -1, self.dim)
        key = rotate(self.k_norm(self.k_proj(x).view(shape)), rotary).transpose(1, 2)
        kept: tuple[Tensor, Tensor] = cache.update(key, self.v_proj(x).view(shape).transpose(1, 2), self.layer)
        return kept

    def forward(self, x: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | None, cache: Any) -> Tensor:
        """Attend all keys that the mask shows; None: all."""
        query = rotate(self.q_norm(self.q_proj(x).view(*x.shape[:2], -1, self.dim)), rotary).transpose(1, 2)
        attended: Tensor = self.o_proj(grouped_attention(query, *self.write(x, rotary, cache), mask).flatten(2))
        return attended


class BlockLayer(Residual):
    """A layer of Qwen3 with such attention."""

    attention = BlockAttention

    def __init__(self, config: Any, layer: int) -> None:
        """Take the sizes from a configuration, and the number of the layer."""
        super().__init__(config, config.hidden_size, layer)
        self.input_layernorm = norm(config)


class DFlashHead(FeatureHead):
    """Row i of a block predicts its token: the first token is known, the others are masks, and all see each other.

    The features of the tokens before the block are keys and values of every layer. They do not depend on the block, so
    each is written to the cache once.

    Attributes:
        block_size: tokens of a block as it was trained.
        mask_id: the token that stands for those to be drafted.
        starts_early: whether row i predicts the token after it, so that the known token drafts too.
    """

    def __init__(
        self,
        config: Any,
        shared: Shared,
        *,
        levels: tuple[int, ...],
        block_size: int,
        mask_id: int,
        starts_early: bool = False,
        own_output: int = 0,
    ) -> None:
        """Make the head.

        Args:
            config: a Llama configuration of its layers.
            shared: what the target lends.
            levels: see `FeatureHead`.
            block_size: see the attributes.
            mask_id: likewise.
            starts_early: likewise.
            own_output: rows of an output matrix of its own; 0: the target's is used.

        Raises:
            ValueError: no level, or that of the last layer before its norm; a block of one token; a mask that is no id.
        """
        super().__init__(config, shared)
        if not levels or not all(-1 <= level < shared.layers for level in levels):
            raise ValueError(f"DFlashHead: levels must be below {shared.layers}, at least one, got {list(levels)}")
        if block_size < 2:
            raise ValueError(f"DFlashHead: block_size must be at least 2, got {block_size}")
        if not 0 <= mask_id < config.vocab_size:
            raise ValueError(f"DFlashHead: mask_token_id must be in [0, {config.vocab_size}), got {mask_id}")
        self.levels, self.block_size, self.mask_id, self.starts_early = levels, block_size, mask_id, starts_early
        self.fc = nn.Linear(len(levels) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm, self.norm = norm(config), norm(config)
        self.layers = nn.ModuleList([BlockLayer(config, i) for i in range(config.num_hidden_layers)])
        if own_output:
            self.lm_head = nn.Linear(config.hidden_size, own_output, bias=False)

    @property
    def longest(self) -> int:
        """Most tokens that a block drafts."""
        return self.block_size - (not self.starts_early)

    @property
    def fields(self) -> dict[str, Any]:
        """Its config.json, as z-lab publishes one."""
        levels = [level - 1 for level in self.levels]  # z-lab counts layers, from 0
        return {
            **self.config.to_dict(),
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": self.mask_id, "target_layer_ids": levels},
            "num_target_layers": self._shared[0].layers,
        }

    def fuse(self, hidden: Tensor) -> Tensor:
        """Map the states to one normed feature."""
        out: Tensor = self.hidden_norm(self.fc(super().fuse(hidden)))
        return out

    def remember(self, features: Tensor, position_ids: Tensor | None, cache: Any) -> None:
        """Write features ``[batch, count, hidden]`` to the cache; positions as of `forward`."""
        rotary = self._turns.of(features, position_ids, cache)
        for layer in self.layers:
            layer.self_attn.write(features, rotary, cache)  # type: ignore[operator,union-attr]

    def masked(self, last: Tensor, count: int) -> Tensor:
        """Blocks ``[batch, rows]`` that draft `count` tokens behind the known ones ``[batch, 1]``."""
        masks = last.new_full((last.shape[0], count - self.starts_early), self.mask_id)
        return torch.cat([last, masks], 1)

    def forward(  # type: ignore[override]
        self, token_ids: Tensor, position_ids: Tensor | None, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Rows ``[batch, rows, hidden]`` for `logits`.

        Args:
            token_ids: ``[batch, rows]``, see `masked`.
            position_ids: ``[batch or 1, rows]``; None: behind the rows of the cache, as many in each request.
            mask: as SDPA takes it; None: each row sees all that the cache holds, and the block.
            cache: of transformers' kind, with the features.
        """
        x = self.embed(token_ids).to(self.dtype)
        rotary = self._turns.of(x, position_ids, cache)
        for layer in self.layers:
            x = layer.finish(x, layer.input_layernorm(x), rotary, mask, cache)  # type: ignore[operator]
        out: Tensor = self.norm(x)
        return out
