"""Layers for multi-token prediction inside checkpoints, held against transformers, speculators and a plain formula."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drafted_texts import assert_texts, decode
from head_models import shaken, watch
from models import SIZES, VOCAB, model
from safetensors.torch import load_file, save_file
from speculators_package import speculators
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from specdec_loop import heads
from specdec_loop.drafters import EagleDynamicTree, EagleTree, HeadChain
from specdec_loop.drafters.feature_drafter import FeatureDrafter

EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_hidden_layers": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek V3": (
        "DeepseekV3",
        {
            **EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 2, "topk_group": 1,
        },
    ),
    "GLM 4.5": ("Glm4Moe", {**EXPERTS, "use_qk_norm": True}),
    "Qwen3.5 MoE": (
        "Qwen3_5Moe",
        {
            "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
}  # fmt: skip
Logits = Callable[[Tensor, Tensor], Tensor]  # of a whole text, from ids [1, n] and features [1, n, hidden]


@functools.cache
def target_of(family: str) -> Any:
    """A tiny random model of the family, with large weights."""
    if family in ("Qwen3-Next", "Qwen3.5", "MiMo"):
        return model({"Qwen3-Next": "qwen3_next", "Qwen3.5": "qwen3.5", "MiMo": "qwen2"}[family])
    stem, special = FAMILIES[family]
    config_class = getattr(transformers, f"{stem}TextConfig", None) or getattr(transformers, f"{stem}Config")
    config = config_class(**{**SIZES, **special}, attn_implementation="sdpa", initializer_range=0.15)
    torch.manual_seed(0)
    made = getattr(transformers, f"{stem}ForCausalLM")(config).eval().requires_grad_(False)
    made.generation_config.eos_token_id = None
    return made


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each expert's matrices by themselves, as checkpoints have them."""
    split = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            split[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            kinds = (
                {"gate": expert.chunk(2)[0], "up": expert.chunk(2)[1]} if last == "gate_up_proj" else {"down": expert}
            )
            split |= {f"{prefix}.{number}.{kind}_proj.weight": part.clone() for kind, part in kinds.items()}
    return split


def write(folder: Path, target: Any, tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """The target's checkpoint with these tensors beside its own, in one file or several."""
    target.save_pretrained(folder)
    every = list({**load_file(folder / "model.safetensors"), **tensors}.items())
    if shards == 1:
        save_file(dict(every), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    (folder / "model.safetensors").unlink()
    files = {}
    for n in range(shards):
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        save_file(dict(every[n::shards]), folder / file, metadata={"format": "pt"})
        files |= {name: file for name, _ in every[n::shards]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def of_transformers(folder: Path, target: Any) -> Logits:
    """Numbered on from the target's layers: transformers reads the same folder itself."""
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this transformers has no MtpModel")
    number = target.config.num_hidden_layers
    made = shaken(modeling_layers.MtpModel(target, 1).layers[0], seed=1)
    renamed = {"post_norm.weight": "shared_head.norm.weight"}
    tensors = {renamed.get(n, n.removeprefix("mtp_block.")): t.clone() for n, t in made.state_dict().items()}
    tensors |= {"embed_tokens.weight": target.get_input_embeddings().weight.clone()}
    tensors |= {"shared_head.head.weight": target.get_output_embeddings().weight.clone()}
    write(folder, target, {f"model.layers.{number}.{n}": t for n, t in split_experts(tensors).items()}, shards=3)
    target.config.dtype = torch.float32  # saving has made it a string
    target.config.name_or_path, target._keys_to_ignore_on_load_unexpected = str(folder), [rf"model\.layers\.{number}.*"]
    reference = modeling_layers.MtpModel.from_pretrained(target).eval()

    def logits(ids: Tensor, features: Tensor) -> Tensor:
        cache = transformers.cache_utils.MtpCache(config=target.config.get_mtp_config())
        places = 1 + torch.arange(ids.shape[1])[None]
        out = reference.forward_layer(0, features, places, cache, input_ids=ids)
        return target.lm_head(out)

    return logits


def of_speculators(folder: Path, target: Any, in_checkpoint: bool = True) -> Logits:
    """Qwen's ``mtp.*``, which the package converts to its own names; or a folder of its own names."""
    package = speculators()
    layers = target.config.get_text_config()
    config = package.MTPSpeculatorConfig(transformer_layer_config=layers.__class__(**layers.to_dict()))
    reference = package.MTPDraftModel(config)
    layer = shaken(reference.mtp_layers[0], seed=1)
    if in_checkpoint:
        apart = {
            "input_proj": "fc", "final_layernorm": "norm", "hidden_layernorm": "pre_fc_norm_hidden",
            "token_layernorm": "pre_fc_norm_embedding",
        }  # fmt: skip
        own = split_experts({n: t.clone() for n, t in layer.state_dict().items()})
        heads_of = {n: n.split(".")[0] for n in own}
        named = {f"{apart.get(h, f'layers.0.{h}')}{n.removeprefix(h)}": own[n] for n, h in heads_of.items()}
        write(folder, target, {f"mtp.{n}": t for n, t in named.items()})
    else:
        save_file({f"mtp_layers.0.{n}": t for n, t in layer.state_dict().items()}, folder / "model.safetensors")

    def logits(ids: Tensor, features: Tensor) -> Tensor:
        n = ids.shape[1]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        angles = reference.rotary_emb(features, torch.arange(n)[None])
        embedded = target.get_input_embeddings()(ids)
        out = layer(features, embedded, attention_mask=mask, position_embeddings=angles)
        return target.lm_head(out)

    return logits


def of_mimo(folder: Path, target: Any) -> Logits:
    """A plain formula: a layer of Qwen2 behind M [norm(feature); norm(embedding)]. vLLM's mimo_mtp.py has the same."""
    g, wide, config = torch.Generator().manual_seed(1), 32, target.config
    block = shaken(Qwen2DecoderLayer(config, 0), seed=1)
    weights = {name: torch.rand(wide, generator=g) + 0.5 for name in ("token", "hidden", "final")}
    joint = torch.randn(wide, 2 * wide, generator=g) * 0.15
    tensors = {f"{name}_layernorm.weight": weight for name, weight in weights.items()} | {"input_proj.weight": joint}
    tensors |= block.state_dict()
    write(folder, target, {f"model.mtp_layers.0.{n}": t.clone() for n, t in tensors.items()}, shards=2)

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def logits(ids: Tensor, features: Tensor) -> Tensor:
        n = ids.shape[1]
        x = torch.cat([normed(features, "hidden"), normed(target.get_input_embeddings()(ids), "token")], -1) @ joint.T
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        angles = target.model.rotary_emb(x, torch.arange(n)[None])
        x = block(x, attention_mask=mask, position_embeddings=angles)
        return target.lm_head(normed(x, "final"))

    assert isinstance(block.input_layernorm, Qwen2RMSNorm)
    return logits


WRITERS: dict[str, Callable[[Path, Any], Logits]] = {
    "DeepSeek V3": of_transformers,
    "GLM 4.5": of_transformers,
    "Qwen3-Next": of_speculators,
    "Qwen3.5": of_speculators,
    "Qwen3.5 MoE": of_speculators,
    "MiMo": of_mimo,
}


def assert_logits(head: heads.MtpLayer, logits: Logits) -> None:
    """Of a whole text."""
    ids, features = torch.randint(VOCAB, (1, 9)), torch.randn(1, 9, 32)
    assert torch.allclose(head.logits(head(ids, features, torch.arange(9)[None])), logits(ids, features), atol=1e-4)


@pytest.mark.parametrize("family", WRITERS)
def test_layers_are_those_of_another_implementation_and_draft(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    target = target_of(family)
    logits = WRITERS[family](tmp_path, target)
    head = heads.load_mtp_layers(tmp_path, target)
    assert_logits(head, logits)
    assert not hasattr(head, "embed_tokens") and not hasattr(head, "lm_head")  # the target's own
    assert_texts(HeadChain(head), EagleDynamicTree(head, width=2, total=6), EagleTree(head), target=target)


@pytest.mark.parametrize("family", ["DeepSeek V3", "Qwen3-Next"])
@pytest.mark.parametrize("shape", [HeadChain, EagleTree, EagleDynamicTree])
def test_the_cache_of_a_layer_holds_what_the_whole_text_says(family: str, shape: type[FeatureDrafter]) -> None:
    target = target_of(family)
    drafter = shape(shaken(heads.MtpLayer(target, heads.Shared(target))))

    def whole(row: Tensor) -> Tensor:
        features = target(row[:, :-1], output_hidden_states=True).hidden_states[-1]
        return drafter.head(row[:, 1:], features, torch.arange(row.shape[1] - 1)[None])[0, -1]

    compared = watch(drafter, whole)
    decode(target, drafter, "match", 7)
    assert len(compared) > 20


@pytest.mark.parametrize("family", ["Qwen3-Next", "Qwen3.5"])
def test_layers_load_from_the_format_of_speculators(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    target = target_of(family)
    logits = of_speculators(tmp_path, target, in_checkpoint=False)
    assert_logits(heads.load_mtp_layers(tmp_path, target), logits)


def test_tables_that_differ_from_the_targets_are_kept(tmp_path: Path) -> None:
    target = target_of("DeepSeek V3")
    of_transformers(tmp_path, target)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    tables = {
        n: torch.randn(VOCAB, 32)
        for n in ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
    }
    for name, table in tables.items():
        file = tmp_path / index[name]
        save_file({**load_file(file), name: table}, file)
    head = heads.load_mtp_layers(tmp_path, target)
    embedding, output = tables.values()
    assert torch.equal(head.embed(torch.tensor([[3]]))[0, 0], embedding[3])
    x = torch.randn(1, 2, 32)
    assert torch.allclose(head.logits(x), x @ output.T, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name: None if name.startswith("mtp.") else name, r"no tensor is called model\.layers\.3\.\*, mtp\.\*"),
        (lambda name: None if name == "mtp.fc.weight" else name, r"missing: \['eh_proj\.weight'\]"),
        (lambda name: name.replace("mtp.fc.weight", "mtp.fc.scale"), r"not expected: \['eh_proj\.scale'\]"),
        (lambda name: name.replace("mtp.layers.0.", "mtp.layers.1."), "one layer .* is served, got 2"),
        (lambda name: None if "mtp.layers.0.mlp.experts.2.up" in name else name, r"missing: \[.*experts\.2\.up_proj"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[str], str | None], message: str
) -> None:
    target = target_of("Qwen3-Next")
    of_speculators(tmp_path, target)
    tensors = {renamed: t for n, t in load_file(tmp_path / "model.safetensors").items() if (renamed := change(n))}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        heads.load_mtp_layers(tmp_path, target)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    """Their scales stand elsewhere, and without them they are other numbers."""
    target = target_of("Qwen3-Next")
    of_speculators(tmp_path, target)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"eh_proj\.weight is torch\.float8_e4m3fn: quantised weights are not served"):
        heads.load_mtp_layers(tmp_path, target)


def test_a_folder_without_tensors_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors\.index\.json or model\.safetensors"):
        heads.load_mtp_layers(tmp_path, model())
