"""Which models of transformers are served: tiny random ones, continued by each way in and by transformers alone.

    python tests/model_families.py                print the table
    python tests/model_families.py --page FILE    write the page: the table, then all other causal LMs of transformers

Each model continues four prompts of different lengths, greedily, in float32. The drafters know the text and make one
draft in four wrong, so drafts are accepted and rejected; in a tree each right node has a wrong sibling. It exits with 1
if a model gives another text, or fails with anything but a refusal.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec_kernels import Sampling
from specdec_loop import TreeCache, generate, hf
from specdec_loop.drafters import Draft, Drafter
from specdec_loop.sequences import Sequences
from specdec_loop.tree_cache import check_model

VOCAB, WINDOW, NEW, DEPTH, LENGTHS = 61, 6, 20, 3, (9, 1, 5, 14)
FILL = 3  # a token where the text has ended
CLOSE = 2e-3  # of logits, in their standard deviations: rounding gives 3e-4 in deep recurrences, a wrong row 0.3
MOST = 5_000_000  # weights of a model that is tried
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip
MOE: dict[str, Any] = {
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "use_mamba_kernels": False}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
SLIDES: dict[str, Any] = {"sliding_window": WINDOW}
MIXED: dict[str, Any] = {**SLIDES, "layer_types": ["sliding_attention", "full_attention"]}
STATE: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
LAYERS: dict[str, Any] = {"num_layers": 2, "num_heads": 4}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 64,
}  # fmt: skip

# Of models that also take images; here they are given text alone.
IMAGES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "embed_dim": 16, "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}  # fmt: skip
MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
}  # fmt: skip


def _with_images(text: str, images: str, **special: Any) -> dict[str, Any]:
    """Of models of these `model_type`s."""
    return {
        "text_config": {**SIZES, "model_type": text, **special}, "vision_config": {**IMAGES, "model_type": images},
        "projection_dim": 32,
    }  # fmt: skip


# Family: the class, and what its configuration has besides the sizes above.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2, 3": ("LlamaForCausalLM", {}),
    "LLaVA": ("LlavaForConditionalGeneration", _with_images("llama", "clip_vision_model")),
    "Llama 4": ("Llama4ForCausalLM", {**MOE, "intermediate_size_mlp": 48, "attention_chunk_size": 8}),
    "Mistral": ("MistralForCausalLM", SLIDES),
    "Mistral Small 3": ("Mistral3ForConditionalGeneration", _with_images("mistral", "pixtral")),
    "Mixtral": ("MixtralForCausalLM", {**MOE, **SLIDES}),
    "Ministral 3": ("Ministral3ForCausalLM", {}),
    "Qwen 2, 2.5": ("Qwen2ForCausalLM", {}),
    "Qwen 2, sliding": ("Qwen2ForCausalLM", {**MIXED, "use_sliding_window": True}),
    "Qwen 2 MoE": ("Qwen2MoeForCausalLM", MOE),
    "Qwen 3": ("Qwen3ForCausalLM", {}),
    "Qwen 3 MoE": ("Qwen3MoeForCausalLM", MOE),
    "Qwen 3 Next": ("Qwen3NextForCausalLM", {**MOE, **DELTA, **STATE}),
    "Qwen 3.5": ("Qwen3_5ForCausalLM", {**DELTA, **STATE}),
    "Qwen 3.5 MoE": ("Qwen3_5MoeForCausalLM", {**MOE, **DELTA, **STATE}),
    "Qwen 2.5 VL": (
        "Qwen2_5_VLForConditionalGeneration",
        _with_images("qwen2_5_vl_text", "qwen2_5_vl_vision", **MROPE),
    ),
    "Qwen 3 VL": ("Qwen3VLForConditionalGeneration", _with_images("qwen3_vl_text", "qwen3_vl_vision", **MROPE)),
    "Gemma": ("GemmaForCausalLM", {}),
    "Gemma 2": ("Gemma2ForCausalLM", MIXED),
    "Gemma 3": ("Gemma3ForCausalLM", MIXED),
    "Gemma 3n": (
        "Gemma3nForCausalLM",
        {
            **SLIDES, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "laurel_rank": 4,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
            "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "Gemma 4": (
        "Gemma4ForCausalLM",
        {
            **MIXED, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB, "global_head_dim": 8,
            "num_global_key_value_heads": 2, "num_kv_shared_layers": 0,
        },
    ),
    "Gemma 3, images": ("Gemma3ForConditionalGeneration", _with_images("gemma3_text", "siglip_vision_model", **MIXED)),
    "PaliGemma": ("PaliGemmaForConditionalGeneration", _with_images("gemma", "siglip_vision_model")),
    "GPT-OSS": ("GptOssForCausalLM", {**MOE, **MIXED}),
    "DeepSeek V2": ("DeepseekV2ForCausalLM", {**MOE, **MLA}),
    "DeepSeek V3": ("DeepseekV3ForCausalLM", {**MOE, **MLA}),
    "DeepSeek V3.2": ("DeepseekV32ForCausalLM", {**MOE, **MLA}),
    "Kimi Linear": ("KimiLinearForCausalLM", {**MOE, **MLA, **STATE, "linear_head_dim": 8, "linear_num_heads": 2}),
    "Bailing hybrid": (
        "BailingHybridForCausalLM",
        {**MOE, **MLA, **STATE, "linear_head_dim": 8, "linear_num_heads": 2},
    ),
    "Phi 1, 2": ("PhiForCausalLM", {}),
    "Phi 3, 4": ("Phi3ForCausalLM", SLIDES),
    "Phi 3, LongRoPE": ("Phi3ForCausalLM", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "Phi 3.5 MoE": ("PhimoeForCausalLM", {**MOE, **SLIDES}),
    "GLM 4": ("Glm4ForCausalLM", {}),
    "GLM 4.5 MoE": ("Glm4MoeForCausalLM", MOE),
    "Cohere": ("CohereForCausalLM", {}),
    "Cohere 2": ("Cohere2ForCausalLM", MIXED),
    "OLMo": ("OlmoForCausalLM", {}),
    "OLMo 2": ("Olmo2ForCausalLM", {}),
    "OLMo 3": ("Olmo3ForCausalLM", MIXED),
    "OLMo hybrid": ("OlmoHybridForCausalLM", {**DELTA, **STATE}),
    "OLMoE": ("OlmoeForCausalLM", MOE),
    "Granite": ("GraniteForCausalLM", {}),
    "Granite MoE": ("GraniteMoeForCausalLM", MOE),
    "Granite MoE hybrid": (
        "GraniteMoeHybridForCausalLM",
        {**MOE, **MAMBA, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]},
    ),
    "SmolLM 3": ("SmolLM3ForCausalLM", {}),
    "StableLM": ("StableLmForCausalLM", {}),
    "StarCoder 2": ("Starcoder2ForCausalLM", SLIDES),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", {}),
    "Exaone 4": ("Exaone4ForCausalLM", MIXED),
    "MiniMax M2": ("MiniMaxM2ForCausalLM", MOE),
    "Seed-OSS": ("SeedOssForCausalLM", {}),
    "Nemotron": ("NemotronForCausalLM", {}),
    "GPT-2": ("GPT2LMHeadModel", {}),
    "GPT-J": ("GPTJForCausalLM", {"rotary_dim": 4}),
    "GPT-Neo": ("GPTNeoForCausalLM", {**LAYERS, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {}),
    "CodeGen": ("CodeGenForCausalLM", {"rotary_dim": 4}),
    "OPT": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Falcon": ("FalconForCausalLM", {}),
    "Falcon, ALiBi": ("FalconForCausalLM", {"alibi": True}),
    "BLOOM": ("BloomForCausalLM", {}),
    "MPT": ("MptForCausalLM", {}),
    "XGLM": ("XGLMForCausalLM", {"ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    "BERT": ("BertLMHeadModel", {}),
    "BERT, decoder": ("BertLMHeadModel", {"is_decoder": True}),
    "RoBERTa, decoder": ("RobertaForCausalLM", {"is_decoder": True}),
    "BART, decoder": (
        "BartForCausalLM",
        {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "init_std": 0.3},
    ),
    "Mamba": ("MambaForCausalLM", {"state_size": 8}),
    "Mamba 2": ("Mamba2ForCausalLM", {"num_heads": 8, "state_size": 8, "n_groups": 1}),
    "Falcon Mamba": ("FalconMambaForCausalLM", {"state_size": 8}),
    "Falcon H1": (
        "FalconH1ForCausalLM",
        {**MAMBA, "mamba_d_ssm": 64},
    ),
    "Jamba": ("JambaForCausalLM", {**MOE, **MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "Bamba": ("BambaForCausalLM", {**MAMBA, "attn_layer_indices": [1]}),
    "Nemotron H": (
        "NemotronHForCausalLM",
        {**STATE, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
    ),
    "Zamba 2": (
        "Zamba2ForCausalLM",
        {
            "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 8,
            "mamba_d_state": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "num_mem_blocks": 1,
            "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "adapter_rank": 4,
        },
    ),
    "LFM 2": ("Lfm2ForCausalLM", CONV),
    "LFM 2 MoE": ("Lfm2MoeForCausalLM", {**MOE, **CONV, "num_dense_layers": 1}),
    "LFM 3": ("Lfm3ForCausalLM", {**MOE, **CONV}),
    "RWKV": ("RwkvForCausalLM", {"attention_hidden_size": 32}),
    "MiniMax": ("MiniMaxForCausalLM", {**MOE, **STATE}),
}  # fmt: skip
# Names that only configurations outside the table have.
OTHER_SIZES: dict[str, Any] = {
    "d_model": 32, "n_embd": 32, "embed_dim": 32, "ffn_dim": 48, "n_inner": 48, "d_ff": 48, "ffn_hidden_size": 48,
    "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "n_head": 4,
    "n_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "n_positions": 128, "n_ctx": 128,
    "max_seq_len": 128, "init_std": 0.3, "rotary_dim": 4, "word_embed_proj_dim": 32, "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB, "expert_ffn_hidden_size": 24, "zero_expert_num": 2, "moe_topk": 2,
    "is_decoder": True, "keep_window_size": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What became of a family: a word for each way in, and why."""

    family: str
    kind: str
    words: tuple[str, str, str]  # generate, hf.generate, TreeCache: equal, refused, differs or fails
    reason: str

    @property
    def is_faulty(self) -> bool:
        return bool({"differs", "fails"} & {*self.words})


@dataclass(frozen=True)
class Plain:
    """Texts of transformers alone, and the logits of their new tokens."""

    prompts: list[list[int]]
    texts: list[list[int]]
    logits: list[Tensor]  # [NEW, vocab] of each


def build(kind: str, special: dict[str, Any], *, others: bool = False) -> Any:
    """A random model; seeded, so that everybody sees the same."""
    model_class = getattr(transformers, kind)
    config_class = model_class.config_class
    default = config_class()
    sizes = {**SIZES, **OTHER_SIZES, **MOE, **(MLA if "kv_lora_rank" in vars(default) else {})} if others else SIZES
    known = {*vars(default), *config_class.attribute_map}
    config = config_class(**{name: value for name, value in sizes.items() if name in known} | special)
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > MOST:
        raise ValueError(f"{kind} is not tiny: {count} weights")
    torch.manual_seed(0)
    model = model_class(config).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def row(family: str, model: Any) -> Row:
    """Continue the prompts by every way in."""
    plain = _plain(model)
    vocab = plain.logits[0].shape[1]
    drafters = [GuidedChain(plain.texts, vocab), GuidedTree(plain.texts, vocab)]
    ways = (
        [lambda d=d, n=n: _by_generate(model, plain, d, n) for d in drafters for n in (1, len(LENGTHS))],
        [lambda: _by_hf(model, plain, drafters[0])],
        [lambda: _by_cache(model, plain), lambda: _by_plain_calls(model, plain)],
    )
    outcomes = [_worst([_outcome(call) for call in calls]) for calls in ways]
    reason = next((reason for _, reason in outcomes if reason), "")
    words = (outcomes[0][0], outcomes[1][0], outcomes[2][0])
    return Row(family, type(model).__name__, words, reason)


def _outcome(call: Callable[[], bool]) -> tuple[str, str]:
    """A word, and the reason of a refusal."""
    try:
        return ("equal" if call() else "differs"), ""
    except ValueError as error:
        refusal = re.fullmatch(r"TreeCache: \S+ is not served: (.*) \(docs/models.md .*\)", str(error))
        return ("refused", refusal[1]) if refusal else ("fails", f"ValueError: {error}")
    except Exception as error:  # any: the table shows it
        return "fails", f"{type(error).__name__}: {error}"


def _worst(outcomes: Sequence[tuple[str, str]]) -> tuple[str, str]:
    order = ("equal", "refused", "fails", "differs")
    return max(outcomes, key=lambda outcome: order.index(outcome[0]))


# --- the ways in


def _plain(model: Any) -> Plain:
    """Each prompt alone, by transformers' own cache."""
    rng = random.Random(0)
    vocab = model.config.get_text_config(decoder=True).vocab_size
    prompts = [[rng.randrange(3, vocab) for _ in range(n)] for n in LENGTHS]
    texts, logits = [], []
    for prompt in prompts:
        ids, mask = _left_padded([prompt])
        out = model.generate(ids, **_greedy(mask), return_dict_in_generate=True, output_logits=True)
        texts.append(out.sequences[0].tolist())
        logits.append(torch.cat(out.logits))
    return Plain(prompts, texts, logits)


def _by_generate(model: Any, plain: Plain, drafter: Drafter, count: int) -> bool:
    """`specdec_loop.generate`, for the first prompts."""
    prompts, sampling = plain.prompts[:count], Sampling.full(count, temperature=0.0)
    result = generate(
        model, drafter, prompts, sampling=sampling, rule="greedy", max_new_tokens=NEW, stop=(), draft_length=DEPTH
    )
    return [p + new for p, new in zip(prompts, result.tokens, strict=True)] == plain.texts[:count]


def _by_hf(model: Any, plain: Plain, drafter: Drafter) -> bool:
    """`model.generate(custom_generate=hf.generate)`."""
    ids, mask = _left_padded(plain.prompts)
    out = model.generate(ids, **_greedy(mask), custom_generate=hf.generate, drafter=drafter, draft_length=DEPTH)
    return _without_padding(out, mask) == plain.texts


def _by_plain_calls(model: Any, plain: Plain) -> bool:
    """A TreeCache in place of transformers' own, in its own `generate`."""
    ids, mask = _left_padded(plain.prompts)
    cache = _new_cache(model)
    name = {"cache", "cache_params", "past_key_values"} & {*cache.chain_inputs(1)}
    out = model.generate(ids, **_greedy(mask), **dict.fromkeys(name, cache))
    return _without_padding(out, mask) == plain.texts


@torch.no_grad()
def _by_cache(model: Any, plain: Plain) -> bool:
    """Prompts of different lengths on a TreeCache, then trees and chains in turn: logits of what is accepted."""
    rng, cache, lengths = random.Random(0), _new_cache(model), torch.tensor(LENGTHS)
    width = max(LENGTHS)
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in plain.prompts])
    rows = model(ids, **cache.chain_inputs(width)).logits
    worst = max(_gap(plain, b, n - 1, rows[b, n - 1]) for b, n in enumerate(LENGTHS))
    cache.commit(lengths.int() - 1)
    at = list(LENGTHS)  # place of the last committed token, which has no row yet
    is_tree = False
    while any(place < len(text) - 1 for place, text in zip(at, plain.texts, strict=True)):
        is_tree = not is_tree
        left = [len(text) - 2 - place for text, place in zip(plain.texts, at, strict=True)]
        accepted = [rng.randint(0, min(n, DEPTH)) if n >= 0 else -1 for n in left]
        drafts = [
            _draft(text[place:], n, b if is_tree else None)
            for b, (text, place, n) in enumerate(zip(plain.texts, at, accepted, strict=True))
        ]
        inputs = (
            cache.tree_inputs(torch.tensor([d.parents for d in drafts])) if is_tree else cache.chain_inputs(1 + DEPTH)
        )
        rows = model(torch.tensor([d.tokens for d in drafts]), **inputs).logits
        for b, draft in enumerate(drafts):
            gaps = [
                _gap(plain, b, at[b] + i, rows[b, node]) for i, node in enumerate([0, *draft.path][: accepted[b] + 1])
            ]
            worst = max([worst, *gaps])
            at[b] += accepted[b] + 1
        path = torch.tensor([d.path for d in drafts]) if is_tree else None
        cache.commit(torch.tensor(accepted).int(), path)
    return worst <= CLOSE


def _gap(plain: Plain, b: int, place: int, logits: Tensor) -> float:
    """How far the logits behind a token are from those of plain decoding."""
    want = plain.logits[b][place + 1 - len(plain.prompts[b])]
    return float((logits - want).abs().max() / plain.logits[b].std())


def _new_cache(model: Any) -> TreeCache:
    capacity = max(LENGTHS) + NEW + 2 * DEPTH + 1
    return TreeCache(model.config, batch=len(LENGTHS), capacity=capacity, dtype=model.dtype, device=model.device)


def _greedy(mask: Tensor) -> dict[str, Any]:
    return {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW}


def _left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.arange(width) >= width - torch.tensor([[len(prompt)] for prompt in prompts])


def _without_padding(out: Tensor, mask: Tensor) -> list[list[int]]:
    return [line[int((~kept).sum()) :].tolist() for line, kept in zip(out, mask, strict=True)]


# --- drafts


class Nodes(NamedTuple):
    """A draft behind the last committed token, node 0."""

    tokens: list[int]
    parents: list[int]
    path: list[int]  # its right nodes, then -1


def _draft(ahead: list[int], count: int, turn: int | None) -> Nodes:
    """Right tokens for `count` levels and wrong ones below.

    Args:
        ahead: the text from the last committed token on.
        count: of levels with a right token.
        turn: of a tree, which has a wrong sibling at each level: of its levels, the even or the odd ones begin with
            the right token. None: a chain.
    """
    tokens, parents, path, last = ahead[:1] or [FILL], [-1], [], 0
    for level in range(1, DEPTH + 1):
        right = ahead[level] if level <= count else FILL
        wrong = FILL + 1 if right == FILL else FILL
        siblings = [right] if turn is None else [right, wrong] if (level + turn) % 2 else [wrong, right]
        parents += [last] * len(siblings)
        last = len(tokens) + siblings.index(right)
        tokens += siblings
        path.append(last if level <= count else -1)
    return Nodes(tokens, parents, path)


class GuidedChain(Drafter):
    """The right tokens, one in four wrong."""

    rules = ("greedy", "match")

    def __init__(self, texts: list[list[int]], vocab: int) -> None:
        self.texts, self.vocab = texts, vocab

    def draft(self, sequences: Sequences, length: int) -> Draft:
        return Draft(torch.tensor([self._ahead(b, len(row), length) for b, row in enumerate(sequences.rows)]))

    def _ahead(self, b: int, start: int, length: int) -> list[int]:
        ahead = (self.texts[b] + [FILL] * length)[start : start + length]
        return [(x + 1) % self.vocab if (start + i) % 4 == 0 else x for i, x in enumerate(ahead)]


class GuidedTree(GuidedChain):
    """At each level the right token and a wrong one, in turns the first; it goes on behind the right one."""

    def nodes(self, length: int) -> int:
        return 1 + 2 * length

    def draft(self, sequences: Sequences, length: int) -> Draft:
        texts = [
            (text + [FILL] * length)[len(row) - 1 :] for text, row in zip(self.texts, sequences.rows, strict=False)
        ]
        trees = [_draft(text, length, b) for b, text in enumerate(texts)]
        tokens, parents = torch.tensor([t.tokens for t in trees]), torch.tensor([t.parents for t in trees])
        return Draft(tokens, parents=parents.int(), max_depth=length)


# --- the page


HEAD = """# Models

`specdec_loop` serves decoders of transformers whose forward takes `position_ids` and whose layers keep keys and values
of full or sliding attention. Layers with a gated delta rule, with Mamba, Mamba 2 or a short convolution are served
beside such layers (transformers 5.23 or later), and so are Mamba, Mamba 2 and Falcon Mamba, none of whose layers
attends: `commit` advances their states over what was accepted ([Caches](caches.md#recurrent-layers)). Other models are
refused before anything runs, with the reason below.

`make models-page` writes this page, with transformers {version}. It builds a tiny random model of each family and
continues four prompts of different lengths by greedy decoding, {new} tokens each:

- **generate**: `specdec_loop.generate`, with chains and with trees of drafts, for one request and for all four;
- **hf.generate**: `model.generate(..., custom_generate=specdec_loop.hf.generate)`, left-padded;
- **TreeCache**: forwards of chains and trees on a `TreeCache`, whose logits are compared, and a `TreeCache` in plain
  `model.generate`.

*equal*: every text is that of transformers' own `generate` for the prompt alone, though one draft in four is wrong.
*refused*: a `ValueError` that names the reason. Models that also take images were given text alone.

Two more conditions do not depend on the family. The attention implementation must be `sdpa` or `eager`, as others take
no mask for trees. Where rotary angles change at some length (LongRoPE, dynamic), `generate` refuses a text that crosses
it: cached keys would keep the old angles.
"""

OTHERS = """
## Other causal language models of transformers {version}

The same check with generic sizes, and `is_decoder=True` where there is one, for the classes that `AutoModelForCausalLM`
knows and the table lacks.

"""


def page() -> tuple[str, bool]:
    """The page, and whether every model is served or refused."""
    rows, others, untried = table(tuple(FAMILIES)), [], []
    known = {kind for kind, _ in FAMILIES.values()}
    for kind in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()} - known):
        print(kind, file=sys.stderr)
        try:
            others.append(row(kind, build(kind, {}, others=True)))
        except Exception:  # any: a configuration that needs more than sizes
            refused = _refused(kind)
            others += [refused] if refused else []
            untried += [] if refused else [kind]
    faulty = [r.kind for r in others if r.is_faulty]
    reasons = dict.fromkeys(r.reason for r in others if r.reason and not r.is_faulty)
    equal = [r.kind for r in others if not r.reason and not r.is_faulty]
    lines = [f"- **Equal by all ways** ({len(equal)}): {', '.join(equal)}."]
    lines += [f"- **Refused**, {why}: {', '.join(r.kind for r in others if r.reason == why)}." for why in reasons]
    lines += [f"- **Another text, or an error**: {', '.join(faulty)}."] if faulty else []
    lines += [f"- **Not tried**, as they need more than sizes, or have parts that are not tiny: {', '.join(untried)}."]
    told = {"version": transformers.__version__, "new": NEW}
    text = HEAD.format(**told) + "\n" + as_table(rows) + OTHERS.format(**told) + "\n".join(lines) + "\n"
    return text, not any(r.is_faulty for r in [*rows, *others])


def _refused(kind: str) -> Row | None:
    """The row of a class that is refused with its default configuration."""
    config_class = getattr(transformers, kind).config_class
    word, reason = _outcome(lambda: check_model(config_class()) is None)
    return Row(kind, kind, ("refused", "refused", "refused"), reason) if word == "refused" else None


def table(families: Sequence[str]) -> list[Row]:
    """Rows of families."""
    rows = []
    for family in families:
        print(family, file=sys.stderr)
        rows.append(row(family, build(*FAMILIES[family])))
    return rows


def as_table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| family | class | generate | hf.generate | TreeCache | reason |", "|---|---|---|---|---|---|"]
    lines += [f"| {r.family} | `{r.kind}` | {' | '.join(r.words)} | {r.reason} |" for r in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="*", help="of the table; default all")
    parser.add_argument("--page", type=Path, help="write the page here")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # tiny models
    if options.page:
        text, is_sound = page()
        options.page.write_text(text)
    else:
        rows = table(options.family or tuple(FAMILIES))
        print(as_table(rows), end="")
        is_sound = not any(r.is_faulty for r in rows)
    sys.exit(0 if is_sound else 1)


if __name__ == "__main__":
    main()
