"""Which models a `TreeCache` serves. The others are refused before anything runs, with the reason."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, NoReturn

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from .recurrence import modeling_file

LAYER_TYPES = ("full_attention", "sliding_attention")
RECURRENT_TYPES = ("conv", "hybrid", "linear_attention")  # of the families below; hybrid: beside attention
RECURRENT = {  # model types whose recurrent layers are served: function of their modeling file
    "bailing_hybrid": "chunk_kimi_delta_attention",
    "bamba": "mamba2_chunk_scan",
    "falcon_h1": "mamba2_chunk_scan",
    "falcon_mamba": "mamba_selective_scan",
    "granitemoehybrid": "mamba2_chunk_scan",
    "jamba": "mamba_selective_scan",
    "kimi_linear": "chunk_kimi_delta_attention",
    "lfm2": "causal_conv1d_fn",
    "lfm2_moe": "causal_conv1d_fn",
    "lfm3": "causal_conv1d_fn",
    "mamba": "mamba_selective_scan",
    "mamba2": "mamba2_chunk_scan",
    "nemotron_h": "mamba2_chunk_scan",
    "olmo_hybrid": "torch_chunk_gated_delta_rule",
    "qwen3_5_moe_text": "torch_chunk_gated_delta_rule",
    "qwen3_5_text": "torch_chunk_gated_delta_rule",
    "qwen3_next": "torch_chunk_gated_delta_rule",
    "zamba2": "mamba2_chunk_scan",
}
LEAST_STEPS = ("nemotron_h", "zamba2")  # their layers bound time steps by config.time_step_min
WITHOUT_ROWS = ("falcon_mamba", "mamba", "mamba2")  # their forwards take `cache_params` alone, and no positions
RENAMED = "cache"  # `past_key_values` and `cache_params` from transformers 5.24 on
STATE = "its state is recurrent, and a rejected draft cannot be taken out of it"
INDEX = "it chooses keys by an index that a TreeCache does not keep"
COMPRESSED = "it keeps compressed keys, out of which a rejected draft cannot be taken"
OTHER_LAYERS = {
    "chunked_attention": "its masks end at chunks, those of a TreeCache do not",
    "compressed_sparse_attention": COMPRESSED,
    "conv": STATE,
    "heavily_compressed_attention": COMPRESSED,
    "hybrid": STATE,
    "hybrid_sliding": STATE,
    "indexed_attention": INDEX,
    "linear_attention": STATE,
    "minimax_m3_sparse": INDEX,
}
FREE = (0.0, float("inf"))
BOUNDED = "transformers bounds its time steps in forwards of several tokens, and not in those of one"
OFFSET = "its positions begin at pad_token_id + 1, those of a TreeCache begin at 0"
MODEL_TYPES = {  # `tests/model_families.py` found that their texts differ, which nothing else here tells
    "camembert": OFFSET,
    "data2vec-text": OFFSET,
    "doge": "its attention keeps the keys that score best among the slots of the cache, unused ones included",
    "dory": "its layers run in loops, and each adds layers to the cache",
    "gpt_neo": "its local attention counts slots of the cache instead of positions",
    "llama4_text": "its attention scales queries by slots of the cache instead of positions",
    "moshi": "its window is made by dropping rows of the cache, which a TreeCache keeps",
    "paligemma": "tokens of its prompts attend those after them",
    "roberta": OFFSET,
    "roberta-prelayernorm": OFFSET,
    "xlm-roberta": OFFSET,
    "xlm-roberta-xl": OFFSET,
    "xmod": OFFSET,
}
ENCODERS = ("bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert", "rembert", "roc_bert")
WHERE = "docs/models.md lists the models that are served"


def check_model(config: Any, model: Any = None) -> None:
    """Refuse a model whose text would not be that of plain decoding.

    Args:
        config: of the model.
        model: None: the class that transformers has for this configuration is looked at.

    Raises:
        ValueError: says why.

    Example:
        >>> from specdec_loop.tree_cache import check_model
        >>> from transformers import LlamaConfig, MptConfig
        >>> check_model(LlamaConfig())
        >>> check_model(MptConfig())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: TreeCache: MptForCausalLM is not served: its forward takes no position_ids, ...
    """
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind: Any = type(model) if isinstance(model, PreTrainedModel) else known
    name = type(config).__name__ if kind is None else kind.__name__
    decoder = config.get_text_config(decoder=True)
    known_types: tuple[str, ...] = LAYER_TYPES
    if decoder.model_type in RECURRENT:
        _check_recurrent(name, decoder)
        known_types += RECURRENT_TYPES
    for other in sorted(set(getattr(decoder, "layer_types", None) or []) - set(known_types)):
        _refuse(name, f"config.layer_types has {other}: " + OTHER_LAYERS.get(other, "a TreeCache does not know it"))
    if getattr(kind, "_is_stateful", False) and decoder.model_type not in RECURRENT:
        _refuse(name, STATE)
    if kind is not None and decoder.model_type not in WITHOUT_ROWS:
        _check_signature(kind)
    if getattr(decoder, "alibi", False):
        _refuse(name, "its attention is biased by slots of the cache instead of positions (config.alibi)")
    for model_type in {config.model_type, decoder.model_type} & {*MODEL_TYPES}:
        _refuse(name, MODEL_TYPES[model_type])
    if decoder.model_type in ENCODERS and not decoder.is_decoder:
        _refuse(name, "config.is_decoder is False: tokens attend those after them")


def cache_argument(config: Any) -> str:
    """Name under which the forward of a model takes its cache; code outside of transformers may keep the older one."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is not None and takes_renamed(kind):
        return RENAMED
    return "cache_params" if config.get_text_config(decoder=True).model_type in WITHOUT_ROWS else "past_key_values"


def takes_renamed(kind: type[Any]) -> bool:
    """Whether the forward of a model or layer takes its cache under the name of transformers 5.24."""
    taken = inspect.signature(kind.forward).parameters.get(RENAMED)
    return taken is not None and "dict" not in str(taken.annotation)  # XLM has an older one of that name


def has_states(config: Any) -> bool:
    """Whether some layers of a model that is served are recurrent: what they have read cannot be taken back."""
    decoder = config.get_text_config(decoder=True)
    return decoder.model_type in RECURRENT and bool(set(decoder.layer_types) & set(RECURRENT_TYPES))


def last_place(decoder: Any, capacity: int) -> int | None:
    """Last position that a model has a row for; None: it reckons its angles, or the capacity is within its rows."""
    most = getattr(decoder, "max_position_embeddings", None)
    is_reckoned = getattr(decoder, "rope_parameters", None) is not None
    return None if most is None or is_reckoned or capacity <= most else most - 1


def _check_recurrent(name: str, decoder: Any) -> None:
    """Refuse a layout of layers, or a version of transformers, that recurrent layers are not served with."""
    if decoder.model_type not in WITHOUT_ROWS and not set(decoder.layer_types) & {*LAYER_TYPES, "hybrid"}:
        _refuse(name, "none of its layers attends, and a TreeCache counts the rows of one")
    bounds = getattr(decoder, "time_step_limit", None) or FREE
    if decoder.model_type in LEAST_STEPS:
        bounds = (decoder.time_step_min, FREE[1])
    if tuple(bounds) != FREE:
        _refuse(name, BOUNDED)
    if not hasattr(modeling_file(decoder), RECURRENT[decoder.model_type]):
        _refuse(name, "its recurrent layers need transformers 5.23 or later")


@lru_cache(maxsize=64)
def _check_signature(kind: type[Any]) -> None:
    """A forward must take the cache, and positions: nodes of a tree that are siblings have the same one."""
    taken = inspect.signature(kind.forward).parameters
    if "past_key_values" not in taken and not takes_renamed(kind):
        _refuse(kind.__name__, "its forward takes no past_key_values, the cache")
    if "position_ids" not in taken:
        _refuse(kind.__name__, "its forward takes no position_ids, and siblings in a tree have the same position")


def _refuse(name: str, reason: str) -> NoReturn:
    raise ValueError(f"TreeCache: {name} is not served: {reason} ({WHERE})")
