"""SGLang's chain sampler (Triton), with the softmax that its `eagle_sample` runs before it.

Draft probabilities are kept by its drafter in float32 and not in its time. Its top-k/top-p are FlashInfer kernels
that rewrite the probabilities; without a GPU only the unfiltered case is metered.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .lazy import scaled

NAME = "SGLang chain"
WHY = "SGLang's rejection sampling for EAGLE chains"
ORDER = 9
FILE = "kernels/ops/speculative/reject_sampling.py"


def version() -> str:
    """Of the rival."""
    try:
        return f"sglang {metadata.version('sglang')}"
    except metadata.PackageNotFoundError:
        return "sglang, version unknown"


@functools.cache
def _file() -> Path | None:
    # Only the kernel's file: the package itself wants CUDA libraries at import.
    spec = importlib.util.find_spec("sglang")
    places = spec.submodule_search_locations if spec else None
    return next((Path(p) / FILE for p in places or () if (Path(p) / FILE).exists()), None)


def available() -> str | None:
    """None, or why it cannot run here."""
    try:
        found = _file()
    except ImportError as error:
        return f"sglang cannot be looked into: {error}"
    if found is None:
        return "sglang is not installed (pip install --no-deps sglang==0.5.23; its files suffice)"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "its sampler is Triton: timed on a GPU only, metered by python -m bench.traffic"
    return None


@functools.cache
def _kernel() -> Any:
    spec = importlib.util.spec_from_file_location("sglang_reject_sampling", _file())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.chain_speculative_sampling_triton


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    return None if case.filters == "none" else "its filters are FlashInfer's, on the probabilities"


def prepare(target_logits: Tensor, draft_logits: Tensor, *law: Tensor | None) -> tuple[Any, ...]:
    """(target logits, draft probabilities, temperature)."""
    return target_logits, scaled(draft_logits, *law).softmax(-1), law[0]


def verify_prepared(draft_ids: Tensor, prepared: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """(token ids, number accepted)."""
    logits, draft_probs, temperature = prepared
    batch, draft = draft_ids.shape
    slots, device = draft + 1, draft_ids.device
    probs = (logits.float() / temperature[:, None, None]).softmax(-1)
    candidates = torch.cat([draft_ids.new_zeros(batch, 1), draft_ids], 1)
    index = torch.arange(batch * slots, device=device).view(batch, slots)
    predicts = torch.zeros(batch * slots, dtype=torch.int32, device=device)
    accepted = torch.full((batch, slots), -1, dtype=torch.int32, device=device)
    count = torch.zeros(batch, dtype=torch.int32, device=device)
    coins = torch.rand(batch, slots, device=device)
    last = torch.rand(batch, device=device)
    _kernel()(
        predicts, accepted, count, candidates, index, index, index, coins, last, probs, draft_probs, 1.0, 1.0, True
    )
    return predicts.view(batch, slots).long(), count.long()
