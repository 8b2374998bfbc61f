"""Heads in files: as their authors publish them, and as this repository keeps its own.

A folder holds ``config.json`` and one file of tensors, ``.safetensors`` or PyTorch's. The configuration is a Llama one
with fields of the head, or that of the package speculators, which keeps the layers' configuration inside its own. A
head that leaves out the embedding or an output matrix uses the target's. Drafts need not be exact: a head may have a
dtype of its own, with copies of what it borrows where that differs from the target's. On a CPU a lone token reads its
weights in half the time when they are bfloat16; many rows at once need a CPU that multiplies bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from .dflash import DFlashHead
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .layers import Shared, finish, lent
from .medusa import MedusaHeads
from .mtp import MtpHead
from .peagle import PEagleHead

MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
HEAD = ("model.safetensors", "pytorch_model.bin")
LAYERS = ("llama", "qwen3")  # that a head of speculators or DFlash may have
# The values of DFlash's options that are served.
BLOCK_OPTIONS = {
    "is_causal": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}


def load_medusa(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> MedusaHeads:
    """Medusa heads: ``medusa_lm_head`` with tensors ``i.j.linear.weight``, ``.bias`` and ``i.n.weight``.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit together or to the target.
    """
    weights, source = _tensors(Path(folder), MEDUSA)
    weights = {name.removeprefix("medusa_head."): tensor for name, tensor in weights.items()}
    places = {tuple(map(int, name.split(".")[:2])) for name in weights}
    blocks = {tuple(map(int, name.split(".")[:2])) for name in weights if ".linear." in name}
    size = target.get_output_embeddings().weight.shape
    heads = MedusaHeads(
        Shared(target, dtype),
        size=size[1],
        vocab=size[0],
        heads=1 + max(i for i, _ in places),
        layers=1 + max((j for _, j in blocks), default=-1),
        own_output=places != blocks,
    )
    return finish(heads, weights, source, target, dtype)  # type: ignore[return-value]


def load_eagle(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> EagleHead:
    """A head of EAGLE-1 or EAGLE-2: ``fc``, ``layers.0`` without input norm, perhaps ``embed_tokens``.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit.
    """
    weights, source = _tensors(Path(folder), HEAD)
    head = EagleHead(_config(folder), Shared(target, dtype), bias="fc.bias" in weights)
    return finish(head, weights, source, target, dtype)  # type: ignore[return-value]


def load_eagle3(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> Eagle3Head:
    """A head of EAGLE-3 or 3.1: ``fc``, ``midlayer``, ``norm``, ``lm_head``, perhaps ``embed_tokens``, ``d2t``.

    ``midlayer`` may be called ``layers.0``; further layers may follow, and EAGLE-3.1 has more norms.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit, or a configuration that is not served.
    """
    return _load_eagle3(Path(folder), target, dtype, "eagle3", Eagle3Head)


def load_peagle(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> PEagleHead:
    """A head of P-EAGLE: an EAGLE-3 head with ``mask_hidden``, see `load_eagle3`.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit, or a configuration that is not served.
    """
    return _load_eagle3(Path(folder), target, dtype, "peagle", PEagleHead)  # type: ignore[return-value]


def load_mtp(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> MtpHead:
    """A head for multi-token prediction, in this repository's own format.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit.
    """
    weights, source = _tensors(Path(folder), HEAD)
    return finish(MtpHead(_config(folder), Shared(target, dtype)), weights, source, target, dtype)  # type: ignore[return-value]


def load_dflash(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> DFlashHead:
    """A head of DFlash as z-lab publishes it, or in the format of `speculators`; perhaps with ids of its own.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit; a layout of other layers.
    """
    weights, source = _own_tensors(Path(folder))
    config, settings = _block_config(str(folder))
    draft_ids = weights.pop("d2t", None)
    weights.pop("t2d", None)
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    trained = getattr(config, "num_target_layers", None)
    if trained not in (None, layers):
        raise ValueError(f"{folder}: num_target_layers must be {layers}, the target's, got {trained}")
    own_output = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else 0
    if draft_ids is not None and not own_output:
        raise ValueError(f"{source}: tensors missing: lm_head.weight, of the {len(draft_ids)} ids in d2t")
    if own_output and own_output != (config.vocab_size if draft_ids is None else len(draft_ids)):
        expected = "a row for each id of the target" if draft_ids is None else f"{len(draft_ids)} rows, as d2t has"
        raise ValueError(f"{source}: lm_head.weight must have {expected}, got {own_output} rows")
    head = DFlashHead(config, Shared(target, dtype), **settings, own_output=own_output)
    if draft_ids is not None:
        head.map_tokens(draft_ids.to(target.device), source)
    return finish(head, weights, source, target, dtype)  # type: ignore[return-value]


def borrows_tables(folder: Path | str) -> bool:
    """Whether a file holds the layers of a draft model alone, which has the target's embedding: as its index says."""
    path = Path(folder) / HEAD[0]
    if not path.exists():
        return False
    with path.open("rb") as file:
        names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return all(name.startswith(("model.layers.", "model.norm.", "__metadata__")) for name in names)


def load_draft_model(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> Any:
    """A causal LM that borrows the target's embedding and output matrix.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit.
    """
    weights, source = _tensors(Path(folder), HEAD)
    model = LlamaForCausalLM(_config(folder))
    model.set_input_embeddings(lent(target.get_input_embeddings(), dtype))
    model.set_output_embeddings(lent(target.get_output_embeddings(), dtype))
    borrowed = {n: t for n, t in model.state_dict().items() if n.endswith(("embed_tokens.weight", "lm_head.weight"))}
    return finish(model, {**weights, **borrowed}, source, target, dtype)


def save_head(network: nn.Module, folder: Path, config: dict[str, Any], *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write what a head owns, floating-point tensors in `dtype`; Medusa's under Medusa's file name."""
    folder.mkdir(parents=True, exist_ok=True)
    own = network.state_dict()
    if isinstance(network, LlamaForCausalLM):
        own = {n: t for n, t in own.items() if not n.endswith(("embed_tokens.weight", "lm_head.weight"))}
    tensors = {n: (t.to(dtype) if t.is_floating_point() else t).contiguous() for n, t in own.items()}
    name = MEDUSA[0] if isinstance(network, MedusaHeads) else HEAD[0]
    save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _load_eagle3(
    folder: Path, target: Any, dtype: torch.dtype | None, kind: str, network: type[Eagle3Head]
) -> Eagle3Head:
    """A head of this class, which speculators calls `kind`."""
    weights, source = _own_tensors(folder)
    config = _config(folder, kind)
    weights = {
        name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: tensor
        for name, tensor in weights.items()
    }
    config.qk_norm = "midlayer.self_attn.q_norm.weight" in weights
    wide = target.get_input_embeddings().weight.shape[1]
    if config.hidden_size != wide and "embed_tokens.weight" not in weights:
        raise ValueError(f"{source}: tensors missing: embed_tokens.weight: the target's are {wide} wide")
    head = network(config, Shared(target, dtype))
    if "d2t" not in weights:  # the whole vocabulary
        weights["d2t"], weights["t2d"] = head.d2t, torch.ones_like(head.t2d)
    finish(head, weights, source, target, dtype)
    head.map_tokens(head.d2t, source)
    return head


def _config(folder: Path | str, kind: str = "") -> LlamaConfig:
    """A Llama configuration with the fields of the head, whose kind speculators calls `kind`."""
    fields, _ = LlamaConfig.get_config_dict(folder)
    if "speculators_model_type" in fields:
        return _of_speculators(fields, str(folder), kind)
    # Often copied from the target: the first layer_types are the head's, and a lone sliding_window means nothing.
    kinds = (fields.pop("layer_types", None) or [])[: fields.get("num_hidden_layers", 1)]
    if set(kinds) - {"full_attention"}:
        raise ValueError(f"{folder}: layer_types must be full_attention, got {kinds}")
    if not kinds and fields.get("use_sliding_window"):
        raise ValueError(f"{folder}: use_sliding_window must be false, got true: a head attends the whole text")
    return _plain(LlamaConfig(**fields))


def _plain(config: LlamaConfig) -> LlamaConfig:
    config._attn_implementation = "sdpa"  # the masks that Attention takes
    config.sliding_window = config.layer_types = None
    return config


def _of_speculators(fields: dict[str, Any], folder: str, kind: str) -> LlamaConfig:
    """The layers' configuration and the fields of the head in one."""
    got = fields["speculators_model_type"]
    if got != kind:
        raise ValueError(f"{folder}: speculators_model_type must be {kind or 'absent'}, got {got}")
    outside = ("transformer_layer_config", "speculators_config", "architectures", "auto_map", "model_type")
    own = {name: value for name, value in fields.items() if name not in outside}
    return _as_llama(fields.get("transformer_layer_config") or {}, own, folder)


def _as_llama(layers: dict[str, Any], own: dict[str, Any], folder: str) -> LlamaConfig:
    """Of layers, with what their kind leaves out, and fields of the head."""
    model_type = layers.get("model_type", "qwen3")
    if model_type not in LAYERS:
        raise ValueError(f"{folder}: model_type of the layers must be {' or '.join(LAYERS)}, got {model_type}")
    whole = AutoConfig.for_model(**{"model_type": model_type, **layers}).to_dict()
    if set(whole.get("layer_types") or []) - {"full_attention"}:
        raise ValueError(f"{folder}: layer_types must be full_attention, got {whole['layer_types']}")
    return _plain(LlamaConfig(**{"mlp_bias": False, **whole, **own, "model_type": "llama"}))


def _block_config(folder: str) -> tuple[LlamaConfig, dict[str, Any]]:
    """The configuration of the layers of a DFlash head, and the arguments that its file tells."""
    fields, _ = LlamaConfig.get_config_dict(folder)
    is_plain = "speculators_model_type" not in fields  # as z-lab writes it
    own = {**fields, **(fields.get("dflash_config") or {})}
    config = _as_llama(fields, {}, folder) if is_plain else _of_speculators(fields, folder, "dflash")
    levels = "target_layer_ids" if is_plain else "aux_hidden_state_layer_ids"
    for name in (levels, "block_size", "mask_token_id"):
        if own.get(name) is None:
            raise ValueError(f"{folder}: {name} is missing")
    for name, value in BLOCK_OPTIONS.items():
        if own.get(name) not in (None, value):
            raise ValueError(f"{folder}: {name} must be {value}, got {own[name]}")
    if "DFlash2DraftModel" in (own.get("architectures") or []):
        raise ValueError(f"{folder}: architectures must not be DFlash2DraftModel")
    return config, {
        "levels": tuple(level + is_plain for level in own[levels]),  # see DFlashHead.fields
        "block_size": own["block_size"],
        "mask_id": own["mask_token_id"],
        "starts_early": bool(own.get("sample_from_anchor")),
    }


def _own_tensors(folder: Path) -> tuple[dict[str, Tensor], str]:
    """`_tensors` of a head, without those of the target that speculators keeps for training."""
    weights, source = _tensors(folder, HEAD)
    return {name: tensor for name, tensor in weights.items() if not name.startswith("verifier_")}, source


def _tensors(folder: Path, names: tuple[str, ...]) -> tuple[dict[str, Tensor], str]:
    """The tensors of the first of these files that exists, and its name."""
    for name in names:
        path = folder / name
        if path.exists():
            is_safe = name.endswith(".safetensors")
            return load_file(path) if is_safe else torch.load(path, "cpu", weights_only=True), str(path)
    raise FileNotFoundError(f"{folder}: no {' or '.join(names)} here")
