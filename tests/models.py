"""Tiny random models of every family, and what they say when a text is decoded token by token."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor

from specdec_loop.attention import NAME

VOCAB, WINDOW = 61, 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
MIXED = ["full_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 2}),
    "qwen2": ("Qwen2", {"num_hidden_layers": 2}),
    "qwen3, some layers slide": (
        "Qwen3",
        {"num_hidden_layers": 3, "layer_types": MIXED, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "gemma2, softcap": ("Gemma2", {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": WINDOW}),
    "gemma3": ("Gemma3", {"num_hidden_layers": 3, "layer_types": MIXED, "head_dim": 8, "sliding_window": WINDOW}),
    "mistral, all layers slide": ("Mistral", {"num_hidden_layers": 2, "sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"num_hidden_layers": 2, "num_local_experts": 4, "sliding_window": None}),
    "mixtral, all layers slide": (
        "Mixtral",
        {"num_hidden_layers": 2, "num_local_experts": 4, "sliding_window": WINDOW},
    ),
    "cohere2": ("Cohere2", {"num_hidden_layers": 2, "layer_types": MIXED[:2], "sliding_window": WINDOW}),
    "gpt_oss, sinks": (
        "GptOss",
        {"num_hidden_layers": 2, "head_dim": 8, "num_local_experts": 4, "sliding_window": WINDOW},
    ),
}
DELTA: dict[str, Any] = {  # two value heads a key head
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA: dict[str, Any] = {  # four heads a group
    "num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2,
}  # fmt: skip
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {  # some layers are, or all
    "qwen3_next": (
        "Qwen3Next",
        {
            **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3.5": ("Qwen3_5", DELTA),
    "kimi_linear": (
        "KimiLinear",
        {
            "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 8, "linear_num_heads": 2, "num_key_value_heads": 4, "kv_lora_rank": 16,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_local_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
    ),
    "lfm2": ("Lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "granite": (
        "GraniteMoeHybrid",
        {
            **MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "falcon_h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 64}),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
            "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        },
    ),
    "mamba": ("Mamba", {"num_hidden_layers": 2, "state_size": 8}),
    "mamba2": ("Mamba2", {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2}),
    "falcon_mamba": ("FalconMamba", {"num_hidden_layers": 2, "state_size": 8}),
}  # fmt: skip
EAGER = ("gemma2, softcap", "gpt_oss, sinks")  # families whose attention SDPA cannot compute
CASES = [(f, a) for f in FAMILIES for a in ("sdpa", "eager", NAME) if a == "eager" or f not in EAGER]


@functools.cache
def model(family: str = "llama", attention: str = "sdpa", seed: int = 0) -> Any:
    """A model in float32; weights large enough that attention is not uniform."""
    stem, special = (FAMILIES | RECURRENT)[family]
    config_class = getattr(transformers, f"{stem}TextConfig", None) or getattr(transformers, f"{stem}Config")
    kind = getattr(transformers, f"{stem}ForCausalLM")
    attention = attention if kind._supports_sdpa else "eager"  # no layer attends
    config = config_class(**SIZES | special, attn_implementation=attention, initializer_range=0.15)
    torch.manual_seed(seed)
    made = kind(config).eval().requires_grad_(False)
    made.generation_config.eos_token_id = None
    return made


class Sequential:
    """One request, one token at a time, through transformers' own growing cache."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.cache = transformers.DynamicCache(config=network.config)

    def feed(self, tokens: list[int]) -> Tensor:
        """Logits after each token, [tokens, vocab]."""
        rows = []
        for t in tokens:
            if all(self.cache.is_linear):
                given = {"cache_params": self.cache}
            else:
                place = torch.tensor([[self.cache.get_seq_length()]])
                given = {"past_key_values": self.cache, "position_ids": place}
            rows.append(self.network(torch.tensor([[t]]), **given).logits[0])
        return torch.cat(rows)
