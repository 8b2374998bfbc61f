"""Attention of grouped heads under a mask without copies: transformers' SDPA repeats keys and values for every head."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "specdec_grouped"
UNUSUAL = ("softcap", "position_bias", "cache", "output_attentions")  # options that are left to transformers
# Elements of the keys up to which SDPA's own grouping is faster on a CPU: 18 us against 31 with 21 thousand, 4 nodes;
# 63 against 73 with 168 thousand; 2.4 ms against 1.4 with 3 million. Repeating takes 43 us, 173 us and 29 ms.
SMALL = 2**17


def grouped_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """SDPA, the heads that share keys being rows of one head: of transformers' attention functions.

    Args:
        module: of the model.
        query: ``[batch, head, node, dim]``.
        key: ``[batch, group, key, dim]``.
        value: like key.
        attention_mask: ``[batch or 1, 1, node, key]``; without one transformers' function does as well.
        dropout: of training, which is left to transformers.
        scaling: of the scores.
        options: see `UNUSUAL`.

    Returns:
        ``[batch, node, head, dim]``, and no weights.
    """
    heads, groups = query.shape[1], key.shape[1]
    is_usual = not dropout and not any(options.get(name) is not None for name in UNUSUAL)
    if attention_mask is None or heads == groups or attention_mask.shape[1] != 1 or not is_usual:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return out, None
    if key.device.type == "cpu" and key.numel() <= SMALL:
        out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    batch, nodes, repeats = len(query), query.shape[2], heads // groups
    rows = query.reshape(batch, groups, repeats * nodes, -1)
    mask = attention_mask.expand(-1, repeats, -1, -1).reshape(len(attention_mask), 1, repeats * nodes, -1)
    out = scaled_dot_product_attention(rows, key, value, mask, scale=scaling)
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_sdpa)
AttentionMaskInterface.register(NAME, sdpa_mask)


def forward(model: Any, token_ids: Tensor, inputs: dict[str, Any], **more: Any) -> Any:
    """``model(token_ids, **inputs, **more)``; a model of SDPA attends by `grouped_sdpa` meanwhile if there is a mask.

    Args:
        model: a transformers causal LM.
        token_ids: of the nodes, none below 0.
        inputs: from a `TreeCache`.
        more: of the model's arguments.

    Returns:
        What the model returns.

    Example:
        >>> import torch
        >>> from specdec_loop.tree_cache import TreeCache, forward
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes))
        >>> cache = TreeCache(model.config, batch=1, capacity=32, dtype=model.dtype, device=model.device)
        >>> with torch.no_grad():
        ...     prefill = forward(model, torch.tensor([[5, 6, 7]]), cache.chain_inputs(3))
        ...     cache.commit(2)
        ...     logits = forward(model, torch.tensor([[4, 2, 3]]), cache.tree_inputs(torch.tensor([[-1, 0, 0]]))).logits
        tensor([0], dtype=torch.int32)
    """
    config = model.config.get_text_config(decoder=True)
    if inputs.get("attention_mask") is None or config._attn_implementation != "sdpa":
        return model(token_ids, **inputs, **more)
    config._attn_implementation = NAME
    try:
        return model(token_ids, **inputs, **more)
    finally:
        config._attn_implementation = "sdpa"
