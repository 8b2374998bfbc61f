"""Heads in files: as their authors publish them, and as this repository keeps its own.

A folder holds ``config.json`` and one file of tensors, ``.safetensors`` or PyTorch's. A head that leaves out the
embedding or an output matrix uses the target's. Drafts need not be exact: a head may have a dtype of its own, with
copies of what it borrows where that differs from the target's. On a CPU a lone token reads its weights in half the time
when they are bfloat16; many rows at once need a CPU that multiplies bfloat16.
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
from .layers import FeatureHead, Shared, lent, load_exactly
from .medusa import MedusaHeads
from .mtp import MtpHead

MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
HEAD = ("model.safetensors", "pytorch_model.bin")


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
    return _finish(heads, weights, source, target, dtype)  # type: ignore[return-value]


def load_eagle(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> EagleHead:
    """A head of EAGLE-1 or EAGLE-2: ``fc``, ``layers.0`` without input norm, perhaps ``embed_tokens``.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit.
    """
    weights, source = _tensors(Path(folder), HEAD)
    head = EagleHead(_config(folder), Shared(target, dtype), bias="fc.bias" in weights)
    return _finish(head, weights, source, target, dtype)  # type: ignore[return-value]


def load_eagle3(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> Eagle3Head:
    """A head of EAGLE-3: ``fc``, ``midlayer``, ``norm``, ``lm_head``, ``d2t``, ``t2d``, perhaps ``embed_tokens``.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit.
    """
    weights, source = _tensors(Path(folder), HEAD)
    head = Eagle3Head(_config(folder), Shared(target, dtype))
    if "d2t" not in weights:  # the whole vocabulary
        weights["d2t"], weights["t2d"] = head.d2t, torch.ones_like(head.t2d)
    _finish(head, weights, source, target, dtype)
    head.map_tokens()
    return head


def load_mtp(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> MtpHead:
    """A head for multi-token prediction, in this repository's own format.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit.
    """
    weights, source = _tensors(Path(folder), HEAD)
    return _finish(MtpHead(_config(folder), Shared(target, dtype)), weights, source, target, dtype)  # type: ignore[return-value]


def load_dflash(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> DFlashHead:
    """A head of DFlash as z-lab publishes it, or in the format of `speculators`; perhaps with ids of its own.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: tensors that do not fit; a layout of other layers.
    """
    weights, source = _tensors(Path(folder), HEAD)
    config, settings = _block_settings(Path(folder) / "config.json")
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("verifier_")}
    draft_ids = weights.pop("d2t", None)
    weights.pop("t2d", None)
    own_output = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else 0
    if own_output and own_output != (config.vocab_size if draft_ids is None else len(draft_ids)):
        expected = "a row for each id of the target" if draft_ids is None else f"{len(draft_ids)} rows, as d2t has"
        raise ValueError(f"{source}: lm_head.weight must have {expected}, got {own_output} rows")
    head = DFlashHead(config, Shared(target, dtype), **settings, own_output=own_output)
    if draft_ids is not None:
        head.token_map = (torch.arange(len(draft_ids)) + draft_ids).int().to(target.device)
    return _finish(head, weights, source, target, dtype)  # type: ignore[return-value]


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
    return _finish(model, {**weights, **borrowed}, source, target, dtype)


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


def _config(folder: Path | str) -> Any:
    return _plain(LlamaConfig.from_pretrained(folder))


def _plain(config: Any) -> Any:
    config._attn_implementation = "sdpa"  # the masks that Attention takes
    config.sliding_window = config.layer_types = None  # copied from the target; a head sees the whole text
    return config


def _block_settings(path: Path) -> tuple[Any, dict[str, Any]]:
    """The configuration of the layers of a DFlash head, and the arguments that its file tells."""
    fields = json.loads(path.read_text())
    known = fields.get("speculators_model_type")
    own = fields if known else {**fields, **(fields.get("dflash_config") or {})}
    levels = "aux_hidden_state_layer_ids" if known else "target_layer_ids"
    layers = fields.get("transformer_layer_config") if known else fields
    for name in (levels, "block_size", "mask_token_id", *(["transformer_layer_config"] if known else ())):
        if own.get(name) is None:
            raise ValueError(f"{path}: {name} is missing")
    types = set(layers.get("layer_types") or []) - {"full_attention"}
    other = {
        "speculators_model_type": known not in (None, "dflash"),
        "architectures": "DFlash2DraftModel" in (fields.get("architectures") or []),
        "layer_types": bool(types),
        "is_causal": bool(own.get("is_causal")),
        "input_embedding_scale": own.get("input_embedding_scale", 1.0) != 1.0,
        "output_multiplier": own.get("output_multiplier", 1.0) != 1.0,
        "final_logit_softcapping": bool(own.get("final_logit_softcapping")),
    }
    for name in (name for name, is_other in other.items() if is_other):
        raise ValueError(f"{path}: {name} is {own.get(name, sorted(types))!r}: this layout is not known here")
    known_kind = type(AutoConfig.for_model(layers.get("model_type", "qwen3")))  # whose defaults files leave out
    config = LlamaConfig.from_dict({"mlp_bias": False, **known_kind(**layers).to_dict(), "model_type": "llama"})
    return _plain(config), {
        "levels": tuple(level if known else level + 1 for level in own[levels]),  # see DFlashHead.fields
        "block_size": own["block_size"],
        "mask_id": own["mask_token_id"],
        "starts_early": bool(own.get("sample_from_anchor")),
    }


def _tensors(folder: Path, names: tuple[str, ...]) -> tuple[dict[str, Tensor], str]:
    """The tensors of the first of these files that exists, and its name."""
    for name in names:
        path = folder / name
        if path.exists():
            is_safe = name.endswith(".safetensors")
            return load_file(path) if is_safe else torch.load(path, "cpu", weights_only=True), str(path)
    raise FileNotFoundError(f"{folder}: no {' or '.join(names)} here")


def _finish(
    network: nn.Module, weights: dict[str, Tensor], source: str, target: Any, dtype: torch.dtype | None
) -> nn.Module:
    """Load, and go where the target is."""
    if isinstance(network, FeatureHead) and "embed_tokens.weight" in weights:
        network.embed_tokens = nn.Embedding(*weights["embed_tokens.weight"].shape)
    for weight in network.parameters():  # and no buffer: angles stay exact
        weight.data = weight.data.to(dtype or target.dtype)
    load_exactly(network, weights, source)
    return network.to(target.device).eval().requires_grad_(False)
