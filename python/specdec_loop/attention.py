"""Attention of grouped heads without copies: transformers' SDPA repeats the keys, and a CPU's attends head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "specdec_grouped"
# The heads of a group as rows of one head, beside SDPA's own grouping, two cores of an AMD EPYC (Zen 5), 1,024 keys: 8
# groups of 32 heads, dim 128, 3 nodes 442 us against 811, one of bfloat16 302 against 3,132; 2 of 4, dim 64, batch 8, 3
# nodes 301 against 471. Only a lone float32 node of two heads a group is slower: 172 against 159, of 128 keys 47
# against 28. The mask is written once for each head of a group, repeats * nodes values a key, where a key has groups *
# dim: 1.1 times faster with half as many, slower with as many.
MASK_SHARE = 0.5
FEW = 2  # heads of such a group


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
        attention_mask: ``[batch or 1, 1, node, key]``; others are left to transformers, and none for several nodes.
        dropout: of training, left to transformers.
        scaling: of the scores.
        options: softcap, position_bias and cache are left to transformers.

    Returns:
        ``[batch, node, head, dim]``, and no weights.
    """
    get, own = options.get, (1, query.shape[2])
    is_usual = not dropout and not get("output_attentions")
    is_usual = is_usual and get("softcap") is None and get("position_bias") is None and get("cache") is None
    is_known = own == (1, 1) if attention_mask is None else attention_mask.shape[1:3] == own
    is_fast = query.shape[1] > key.shape[1] and (_packs(query, key, attention_mask) or key.device.type == "cpu")
    if not (is_usual and is_known and is_fast):
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return out, None
    return grouped_attention(query, key, value, attention_mask, scaling), None


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """SDPA of grouped heads; without a mask every node attends all keys. Shapes as of `grouped_sdpa`.

    Returns:
        ``[batch, node, head, dim]``, contiguous.
    """
    if not _packs(query, key, mask):
        out = scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    (batch, heads, nodes, _), groups = query.shape, key.shape[1]
    repeats = heads // groups
    rows = query.reshape(batch, groups, repeats * nodes, -1)
    if mask is not None:
        mask = mask.expand(-1, repeats, nodes, -1).reshape(len(mask), 1, repeats * nodes, -1)
    out = scaled_dot_product_attention(rows, key, value, mask, scale=scale)
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()


def _packs(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether the heads of a group become rows of one head."""
    nodes, groups, on_gpu = query.shape[2], key.shape[1], key.device.type != "cpu"
    repeats = query.shape[1] // groups
    # A GPU has kernels for no mask.
    is_cheap = not on_gpu if mask is None else repeats * nodes <= MASK_SHARE * groups * key.shape[3]
    is_faster = on_gpu or nodes > 1 or repeats > FEW or key.dtype != torch.float32
    return repeats > 1 and is_cheap and is_faster


AttentionInterface.register(NAME, grouped_sdpa)
AttentionMaskInterface.register(NAME, sdpa_mask)


def forward(model: Any, token_ids: Tensor, inputs: dict[str, Any], **more: Any) -> Any:
    """``model(token_ids, **inputs, **more)``; a model of SDPA attends by `grouped_sdpa` meanwhile, but for a prompt.

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
    is_prompt = inputs.get("attention_mask") is None and token_ids.shape[1] > 1
    if is_prompt or not is_ours or not getattr(model, "_supports_attention_backend", False):
        return model(token_ids, **inputs, **more)
    config._attn_implementation = NAME
    try:
        return model(token_ids, **inputs, **more)
    finally:
        config._attn_implementation = "sdpa"
