"""What each drafter learns from the target: its law of the next tokens, and for EAGLE its states too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from ..heads import EagleHead, FeatureHead, MedusaHeads

STEPS = 3  # of a head that goes on from its own features
DECAY = 0.8  # weight of each further step or head
REGRESSION = 0.1  # weight of the distance between states


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean cross-entropy of the student's law under the teacher's; both logits ``[.., vocab]``."""
    cross: Tensor = -(teacher.float().softmax(-1) * student.float().log_softmax(-1)).sum(-1)
    return cross.mean()


def draft_model_loss(model: Any, ids: Tensor, teacher: Any) -> Tensor:
    """The same law at every token."""
    return divergence(model(ids, use_cache=False).logits, teacher.logits)


def medusa_loss(heads: MedusaHeads, ids: Tensor, teacher: Any) -> Tensor:
    """Head i at token t learns the target's law at token t + 1 + i."""
    logits: Tensor = heads(teacher.hidden_states[-1])
    tokens = ids.shape[1]
    total = logits.new_zeros((), dtype=torch.float32)
    for i in range(len(heads)):
        known = tokens - 1 - i
        total = total + DECAY**i * divergence(logits[:, :known, i], teacher.logits[:, 1 + i :])
    return total


class Steps:
    """Keys and values of all steps so far, as a cache hands them out."""

    def __init__(self) -> None:
        """Begin without any."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Add a step's and return all, side by side."""
        self.keys.append(keys)
        self.values.append(values)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


def feature_loss(head: FeatureHead, ids: Tensor, teacher: Any) -> Tensor:
    """Several steps of the head from every token, each from its own last feature, as when it drafts.

    At step s row i continues the text from pair i: it reads token i + 1 + s, attends to the target's features up to i
    and to its own of the steps since, and learns the target's law at token i + 1 + s.
    """
    pairs = ids.shape[1] - 1
    hidden = torch.cat([teacher.hidden_states[level] for level in head.levels], -1)
    features, tokens = head.fuse(hidden[:, :-1]), ids[:, 1:]
    place = torch.arange(pairs, device=ids.device)
    own = torch.eye(pairs, dtype=torch.bool, device=ids.device)
    seen, cache = place <= place[:, None], Steps()
    columns = None if head.token_map is None else head.token_map.long()
    total = torch.zeros((), device=ids.device)
    for step in range(STEPS):
        known = pairs - step
        shown = torch.nn.functional.pad(tokens[:, step:], (0, step))
        features = head(shown, features, (place + step)[None], seen[None, None], cache)
        law = teacher.logits[:, 1 + step :]
        law = law if columns is None else law[..., columns]
        total = total + DECAY**step * divergence(head.logits(features[:, :known]), law)
        if isinstance(head, EagleHead):
            state = teacher.hidden_states[-1][:, 1 + step :].float()
            total = total + DECAY**step * REGRESSION * smooth_l1_loss(features[:, :known].float(), state)
        seen = torch.cat([seen, own], 1)
    return total
