"""Attention of grouped heads without copies: for several nodes under a mask, transformers' SDPA repeats the keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "specdec_grouped"
# Elements of the keys up to which SDPA's own grouping is faster on a CPU: 18 us against 31 with 21 thousand, 4 nodes;
# 63 against 73 with 168 thousand; 2.4 ms against 1.4 with 3 million. Repeating takes 43 us, 173 us and 29 ms.
SMALL = 2**17
# Packing writes the mask once for each head of a group, repeats * nodes values a key, where a key has groups * dim. On
# a CPU it beats SDPA's own grouping up to about half as many: 0.12 of them 23 ms against 29, 0.44 1.8 ms against 4.1;
# 1 of them 41 ms against 35, 3.5 24 ms against 18.
MASK_SHARE = 0.5


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
        value: ``[batch, group, key, value dim]``.
        attention_mask: ``[batch or 1, 1, node, key]``; others, and none, are left to transformers.
        dropout: of training, left to transformers.
        scaling: of the scores.
        options: softcap, position_bias and cache are left to transformers.

    Returns:
        ``[batch, node, head, dim]``, and no weights.
    """
    heads, nodes, groups = query.shape[1], query.shape[2], key.shape[1]
    get = options.get
    is_usual = not dropout and not get("output_attentions")
    is_usual = is_usual and get("softcap") is None and get("position_bias") is None and get("cache") is None
    is_masked = attention_mask is not None and attention_mask.shape[1:3] == (1, nodes)
    packs = heads // groups * nodes <= MASK_SHARE * groups * key.shape[3]
    on_cpu = key.device.type == "cpu"
    if attention_mask is None or heads == groups or not (is_masked and is_usual and (packs or on_cpu)):
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return out, None
    if on_cpu and (key.numel() <= SMALL or not packs):
        out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    repeats = heads // groups
    rows = query.reshape(len(query), groups, repeats * nodes, -1)
    mask = attention_mask.expand(-1, repeats, -1, -1).reshape(len(attention_mask), 1, repeats * nodes, -1)
    out = scaled_dot_product_attention(rows, key, value, mask, scale=scaling)
    return out.reshape(len(query), heads, nodes, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_sdpa)
AttentionMaskInterface.register(NAME, sdpa_mask)


def forward(model: Any, token_ids: Tensor, inputs: dict[str, Any], **more: Any) -> Any:
    """``model(token_ids, **inputs, **more)``; a model of SDPA attends by `grouped_sdpa` meanwhile if there is a mask.

    Models that do not take their attention from transformers' table are left as they are.

    Args:
        model: a transformers causal LM.
        token_ids: of the nodes, none below 0.
        inputs: from a `TreeCache`.
        more: of the model's arguments.

    Returns:
        What the model returns.

    Example:
        >>> import torch
        >>> from specdec_loop import TreeCache
        >>> from specdec_loop.attention import forward
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
    is_ours = config._attn_implementation == "sdpa" and not config.sub_configs  # those would be set too, and stay so
    if inputs.get("attention_mask") is None or not is_ours or not getattr(model, "_supports_attention_backend", False):
        return model(token_ids, **inputs, **more)
    config._attn_implementation = NAME
    try:
        return model(token_ids, **inputs, **more)
    finally:
        config._attn_implementation = "sdpa"
