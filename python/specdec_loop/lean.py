"""A small Llama without transformers' wrappers: on a draft model of one layer they take a third of a token's time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import LlamaForCausalLM

from .heads.layers import GROWING, Turns, attend

# Beyond it arithmetic outweighs the wrappers, and `attention.forward` knows how to attend to many keys.
WIDEST = 1024


class LeanLlama:
    """Runs a `LlamaForCausalLM` on a `TreeCache` through its own modules and weights, for inference alone.

    A token of the repository's draft model takes 0.69 ms in place of 1.05 (2 CPU cores, fp32).

    Example:
        >>> import torch
        >>> from specdec_loop import TreeCache
        >>> from specdec_loop.lean import LeanLlama
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).eval()
        >>> cache = TreeCache(model.config, batch=1, capacity=32, dtype=model.dtype, device=model.device)
        >>> with torch.no_grad():
        ...     LeanLlama(model)(torch.tensor([[5, 6, 7]]), cache.chain_inputs(3), logits_to_keep=1).shape
        torch.Size([1, 1, 9])
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        """Look at the model; its weights stay its own, and may be cast or moved."""
        self.model = model
        self._turns = Turns(model.config)

    @staticmethod
    def suits(model: Any) -> bool:
        """Whether this is what `model` does, and worth it; a subclass or another attention may differ."""
        if type(model) is not LlamaForCausalLM or model.training:
            return False
        config = model.config
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        is_fixed = rope not in GROWING and config.hidden_act == "silu"
        return bool(is_fixed and config._attn_implementation == "sdpa" and config.hidden_size <= WIDEST)

    def reach(self, positions: int) -> None:
        """See `Turns.reach`."""
        self._turns.reach(positions)

    def __call__(self, token_ids: Tensor, inputs: Mapping[str, Any], logits_to_keep: int | Tensor = 0) -> Tensor:
        """Logits, as of ``model(token_ids, **inputs, logits_to_keep=logits_to_keep)``.

        Args:
            token_ids: ``[batch, nodes]``, none below 0.
            inputs: of a `TreeCache`.
            logits_to_keep: so many last rows, 0: all; or which.
        """
        model, config = self.model.model, self.model.config
        cache = inputs["cache"] if "cache" in inputs else inputs["past_key_values"]
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        x: Tensor = model.embed_tokens(token_ids)
        rotary = self._turns.of(x, positions, cache)
        for number, layer in enumerate(model.layers):
            attention = layer.self_attn
            seen = _normed(x, layer.input_layernorm)
            heads, dim = config.num_attention_heads, attention.head_dim
            x = x + attend(attention, heads, dim, seen, rotary, mask, cache, number)
            x = x + layer.mlp(_normed(x, layer.post_attention_layernorm))
        kept = x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep]
        logits: Tensor = self.model.lm_head(_normed(kept, model.norm))
        return logits


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)  # type: ignore[arg-type]
