"""transformers' own `_speculative_sampling`, the function its assisted decoding calls (batch 1 only).

It takes logits that the processors have been through already. That work is not in its time, to its advantage: the input
here is made float32 and divided by the temperature beforehand. hf_step.py is the same with that work.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from inspect import signature
from typing import Any

from torch import Tensor

from specdec_kernels import Sampling

NAME = "transformers"
WHY = "the sampling function of transformers' assisted decoding, one request at a time"
ORDER = 5


def version() -> str:
    """Of the rival."""
    return f"transformers {metadata.version('transformers')}" if available() is None else "not installed"


def available() -> str | None:
    """None, or why it cannot run here."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed (pip install -r requirements/dev.txt)"
    return None


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    return "takes one request at a time" if case.batch != 1 else None


def prepare(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Processed float32 logits, as assisted decoding holds them; not timed."""
    from .eager import scaled

    return scaled(target_logits, sampling), scaled(draft_logits, sampling)


def verify_prepared(draft_ids: Tensor, processed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(token ids [1, accepted + 1], number accepted)."""
    from transformers.generation.utils import _speculative_sampling

    target, drafted = processed
    older = {"is_done_candidate": False} if "is_done_candidate" in signature(_speculative_sampling).parameters else {}
    tokens, count = _speculative_sampling(draft_ids, drafted, draft_ids.shape[1], target, **older)
    return tokens, count[None]
