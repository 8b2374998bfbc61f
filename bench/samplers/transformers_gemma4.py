"""transformers' assisted decoding with a Gemma-4 assistant: its own candidate generator, then `_speculative_sampling`.

The assistant drafts the argmax and hands over the logits, and verification takes their softmax for the draft's
distribution. Only the assistant network is ours: a stand-in that answers with a given row.
"""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..rivals import hf
from ..rivals.hf import prepare, supports, verify_prepared, version

__all__ = ["available", "prepare", "supports", "verify_prepared", "version"]
NAME = "transformers, Gemma-4 assistant"


def available() -> str | None:
    """None, or why it cannot run here."""
    if hf.available() is not None:
        return hf.available()
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    if "input_ids" in signature(SinglePositionMultiTokenCandidateGenerator).parameters:
        return f"{version()} makes the generator for a prompt and a model, 5.23 without them"
    return None


class Gemma4AssistantForCausalLM:
    """Answers every call with one row; the generator asks for the class by name."""

    device = torch.device("cpu")
    generation_config = SimpleNamespace(num_assistant_tokens=1)

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def __call__(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.row[None, None], last_hidden_state=torch.zeros(1, 1, 1))


def propose(draft_logits: Tensor) -> Tensor:
    """The id that transformers' generator drafts from each row."""
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    rows, place = draft_logits.unique(dim=0, return_inverse=True)
    outputs = SimpleNamespace(hidden_states=[torch.zeros(1, 1, 1)], shared_kv_states={})
    ids = []
    for row in rows:
        generator = SinglePositionMultiTokenCandidateGenerator(
            Gemma4AssistantForCausalLM(row), nn.Embedding(len(row), 1), SimpleNamespace(max_length=8)
        )
        found, logits = generator.get_candidates(torch.zeros(1, 1, dtype=torch.int64), {}, outputs, False, 0)
        assert torch.equal(logits[0, 0], row), "the generator no longer hands over the row as it was"
        ids.append(found[0, -1])
    return torch.stack(ids)[place]
