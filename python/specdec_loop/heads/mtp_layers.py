"""Multi-token-prediction layers inside their target's checkpoint: one more of its layers on [embedding; feature]."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..tree_cache.support import RENAMED, takes_renamed
from .layers import FeatureHead, Shared, Turns, finish

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class Layout(NamedTuple):
    """How checkpoints name the tensors of these layers.

    Attributes:
        pattern: of a name: the layer's number, none: the first, and the rest.
        names: of the rest's beginnings that are not the decoder layer's.
        is_feature_first: the layer joins [feature; embedding].
    """

    pattern: str
    names: dict[str, str]
    is_feature_first: bool = False


DEEPSEEK = {
    "enorm.": "enorm.", "hnorm.": "hnorm.", "eh_proj.": "eh_proj.", "shared_head.norm.": "norm.",
    "shared_head.head.": "lm_head.", "embed_tokens.": "embed_tokens.",
}  # fmt: skip
QWEN = {"pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "fc.": "eh_proj.", "norm.": "norm."}
MIMO = {
    "token_layernorm.": "enorm.", "hidden_layernorm.": "hnorm.", "input_proj.": "eh_proj.", "final_layernorm.": "norm.",
}  # fmt: skip
# DeepSeek V3, GLM 4.5: numbered on from the target's layers.
BEHIND = r"model\.(?:language_model\.)?layers\.(\d+)\.(.+)"
LAYOUTS = (
    Layout(BEHIND, DEEPSEEK),
    Layout(r"mtp\.(?:layers\.(\d+)\.)?(.+)", QWEN),  # Qwen3-Next, Qwen3.5
    Layout(r"model\.mtp_layers\.(\d+)\.(.+)", MIMO, is_feature_first=True),
    Layout(r"mtp_layers\.(\d+)\.(.+)", MIMO),  # of the package speculators, in a folder of its own
)


class MtpLayer(FeatureHead):
    """h' = norm(layer(M [norm(embedding); norm(feature)])), read by the target's output matrix.

    The decoder layer and the norms are of the target's own classes; h' is the next feature.
    """

    def __init__(self, target: Any, shared: Shared, *, is_feature_first: bool = False) -> None:
        """Make the head.

        Args:
            target: a transformers causal LM.
            shared: what it lends.
            is_feature_first: the layer joins [feature; embedding].
        """
        decoder, config = target.get_decoder(), _config(target)
        super().__init__(config, shared, _TargetTurns(decoder.rotary_emb))
        block, norm = (type(module) for module in (decoder.layers[-1], decoder.layers[-1].input_layernorm))
        self.enorm, self.hnorm, self.norm = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = block(config, 0)
        self._cache_argument = RENAMED if takes_renamed(block) else "past_key_values"
        self.is_feature_first = is_feature_first

    def step(
        self, embedded: Tensor, features: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Norm, join, layer, norm."""
        pair = [self.enorm(embedded), self.hnorm(features)]
        x = self.eh_proj(torch.cat(pair[::-1] if self.is_feature_first else pair, -1))
        x = self.block(x, attention_mask=mask, position_embeddings=rotary, **{self._cache_argument: cache})
        out: Tensor = self.norm(x)
        return out


class _TargetTurns(Turns):
    """The target's own rotary angles."""

    def __init__(self, network: nn.Module) -> None:
        """Borrow the module."""
        self._network = network

    def reach(self, positions: int) -> None:
        """It makes the angles of any position."""

    def of(self, x: Tensor, positions: Tensor | None, cache: Any) -> tuple[Tensor, ...]:
        """See `Turns.of`; the two are what the target's layers take."""
        if positions is None:
            first = cache.get_seq_length()
            positions = torch.arange(first, first + x.shape[1], device=x.device)[None]
        angles: tuple[Tensor, ...] = self._network(x, positions)
        return angles


def load_mtp_layers(folder: Path | str, target: Any, *, dtype: torch.dtype | None = None) -> MtpLayer:
    """The layer for multi-token prediction that a target's checkpoint holds beside its own.

    Nothing else of the checkpoint is read. Names are those of DeepSeek V3, GLM 4.5, Qwen3-Next, Qwen3.5, MiMo, or of
    the package speculators. An embedding or output matrix that equals the target's is not kept twice.

    Args:
        folder: of the checkpoint: ``model.safetensors``, or an index and its files.
        target: the model of this checkpoint.
        dtype: of the layer; None: the target's.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: no such layer, more than one, or tensors that do not fit.
    """
    layout, weights, source = _read(Path(folder), target.config.get_text_config(decoder=True).num_hidden_layers)
    weights = _stacked(weights, source)
    head = MtpLayer(target, Shared(target, dtype), is_feature_first=layout.is_feature_first)
    for name, lent in (("embed_tokens", target.get_input_embeddings()), ("lm_head", target.get_output_embeddings())):
        own = weights.get(f"{name}.weight")
        if own is not None and torch.equal(own.to(lent.weight), lent.weight):
            del weights[f"{name}.weight"]
    if "lm_head.weight" in weights:
        vocab, wide = weights["lm_head.weight"].shape
        head.lm_head = nn.Linear(wide, vocab, bias=False)
    return finish(head, weights, source, target, dtype)  # type: ignore[return-value]


def _config(target: Any) -> Any:
    """The target's configuration, of one layer: full attention, and experts where the target has any."""
    config = deepcopy(target.config.get_text_config(decoder=True))
    config.num_hidden_layers = 1
    alike = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}
    for name, value in {**alike, "first_k_dense_replace": 0, "mlp_only_layers": []}.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config._attn_implementation = "sdpa"  # it takes the cache's masks, and none for a prompt
    return config


def _read(folder: Path, layers: int) -> tuple[Layout, dict[str, Tensor], str]:
    """The layer's tensors, under this module's names, and where they are from."""
    path = folder / INDEX
    if path.exists():
        files: dict[str, str] = json.loads(path.read_text())["weight_map"]
    elif (path := folder / WHOLE).exists():
        with safe_open(path, "pt") as file:
            files = dict.fromkeys(file.keys(), WHOLE)
    else:
        raise FileNotFoundError(f"{folder}: no {INDEX} or {WHOLE} here")
    for layout in LAYOUTS:
        matches = {name: match for name in files if (match := re.fullmatch(layout.pattern, name))}
        first = layers if layout.pattern == BEHIND else 0
        numbers = {name: int(match[1] or 0) - first for name, match in matches.items()}
        found = {name: _own_name(matches[name][2], layout.names) for name, n in numbers.items() if n >= 0}
        if max(numbers.values(), default=0) > 0:
            raise ValueError(f"{path}: one layer for multi-token prediction is served, got {1 + max(numbers.values())}")
        if found:
            return layout, _tensors(folder, files, found), str(path)
    names = f"model.layers.{layers}.*, mtp.*, model.mtp_layers.0.* or mtp_layers.0.*"
    raise ValueError(f"{path}: no layer for multi-token prediction here: no tensor is called {names}")


def _own_name(rest: str, names: dict[str, str]) -> str:
    for theirs, ours in names.items():
        if rest.startswith(theirs):
            return ours + rest.removeprefix(theirs)
    return f"block.{rest}"


def _tensors(folder: Path, files: dict[str, str], found: dict[str, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted({files[name] for name in found}):
        with safe_open(folder / file, "pt") as opened:
            tensors |= {ours: opened.get_tensor(name) for name, ours in found.items() if files[name] == file}
    return tensors


def _stacked(weights: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Experts as transformers keeps them: all gates above all ups in one tensor, all downs in another."""
    parts: dict[str, dict[tuple[int, str], Tensor]] = {}
    rest = {}
    for name, tensor in weights.items():
        match = EXPERT.fullmatch(name)
        if match:
            parts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            rest[name] = tensor
    for prefix, experts in parts.items():
        numbers = range(1 + max(number for number, _ in experts))
        every = [(number, kind) for number in numbers for kind in ("gate", "up", "down")]
        missing = [f"{prefix}.{number}.{kind}_proj.weight" for number, kind in every if (number, kind) not in experts]
        if missing:
            raise ValueError(f"{source}: tensors missing: {missing}")
        joined = [torch.cat([experts[number, "gate"], experts[number, "up"]]) for number in numbers]
        rest[f"{prefix}.gate_up_proj"] = torch.stack(joined)
        rest[f"{prefix}.down_proj"] = torch.stack([experts[n, "down"] for n in numbers])
    return rest
