"""The package speculators, of which the networks are imported and nothing that trains them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from head_models import shaken
from models import SIZES
from transformers import LlamaConfig, Qwen3Config

# What its networks import only for annotations and messages, from packages that are not installed here.
STANDS_IN: dict[str, dict[str, Any]] = {
    "speculators.train": {"__path__": []},
    "speculators.train.data": {"BatchType": dict},
}


@functools.cache
def speculators() -> Any:
    """The package; skips a test where it is not installed."""
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("speculators is not installed (pip install --no-deps -r requirements/references.txt)")
    for name, fields in STANDS_IN.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(fields)
        sys.modules.setdefault(name, stand_in)
    return importlib.import_module("speculators")


def draft_head(kind: str, chosen: list[int], *, layers: str = "llama", **options: Any) -> Any:
    """One of its networks, with random weights.

    Args:
        kind: as its classes are called.
        chosen: ids of a draft vocabulary.
        layers: Llama's or Qwen3's.
        options: of the layers, or of the network.
    """
    package, config = speculators(), {"llama": LlamaConfig, "qwen3": Qwen3Config}[layers]
    own = getattr(package, f"{kind}SpeculatorConfig")
    fields = {name: options.pop(name) for name in list(options) if name in own.model_fields}
    sizes = {**SIZES, "num_hidden_layers": 1, **({"head_dim": 16} if layers == "qwen3" else {}), **options}
    inside = config(**sizes, attn_implementation="eager")
    made = getattr(package, f"{kind}DraftModel")(own(transformer_layer_config=inside, **fields))
    if made.use_draft_vocab:
        ids = torch.tensor(chosen)
        seen = torch.zeros(inside.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        made.load_vocab_mappings(seen, ids - torch.arange(len(ids)))
    return shaken(made)
