"""The models of this repository, python/models: the target, its tokenizer, and a drafter for each method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import heads
from .drafters import Blockwise, Drafter, DraftModel, EagleDynamicTree, EagleTree, HeadChain, Medusa

FOLDER = Path(__file__).parents[1] / "models"


def load_target(
    folder: Path | str = FOLDER / "target", *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """A target and its tokenizer, from any folder of transformers.

    Raises:
        FileNotFoundError: no such folder.
    """
    if not (Path(folder) / "config.json").exists():
        raise FileNotFoundError(f"{folder}: no config.json here; --target takes a folder of transformers")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(folder)


def load_drafters(target: Any, folder: Path | str = FOLDER) -> dict[str, Drafter]:
    """The drafters that were distilled from the target, by the name of their method; those that are there."""
    root = Path(folder)
    made: dict[str, Drafter] = {}
    if (root / "draft").exists():
        made["draft model"] = DraftModel(heads.load_draft_model(root / "draft", target))
    if (root / "medusa").exists():
        medusa = heads.load_medusa(root / "medusa", target)
        made |= {"blockwise heads": Blockwise(medusa), "Medusa": Medusa(medusa)}
    if (root / "eagle").exists():
        eagle = heads.load_eagle(root / "eagle", target)
        made |= {"EAGLE-1": EagleTree(eagle), "EAGLE-2": EagleDynamicTree(eagle)}
    if (root / "eagle3").exists():
        made["EAGLE-3"] = EagleDynamicTree(heads.load_eagle3(root / "eagle3", target))
    if (root / "mtp").exists():
        made["MTP"] = HeadChain(heads.load_mtp(root / "mtp", target))
    return made
