"""Losses: every drafter learns the target's next-token distribution, EAGLE-1 its states too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from specdec_loop.heads import DFlashHead, EagleHead, FeatureHead, MedusaHeads

STRIDE = 4  # tokens from one block that is trained to the next
STEPS = 3  # of a head that goes on from its own features
DECAY = 0.8  # weight of each further step or head
REGRESSION = 0.1  # weight of the distance between states


class Distributions(NamedTuple):
    """Predictions of a drafter and of the target for a batch.

    Attributes:
        pairs: of each step or head, the drafter's logits and the target's probabilities of its ids, ``[.., vocab]``.
        drift: distance between the drafter's states and the target's, where it learns them.
    """

    pairs: list[tuple[Tensor, Tensor]]
    drift: Tensor | None = None


Criterion = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, distribution: Tensor) -> Tensor:
    """Mean cross-entropy of the drafter's distribution under the target's: how a drafter begins."""
    return -(distribution * logits.float().log_softmax(-1)).sum(-1).mean()


def refusal(logits: Tensor, distribution: Tensor) -> Tensor:
    """Mean of minus the logarithm of the overlap, the chance that a draft is accepted.

    A small drafter cannot have the target's distribution; of the distributions it can have, cross-entropy chooses one
    that covers all that the target may say, this one that meets it most often. From an untrained drafter it learns
    slower.
    """
    return -overlap(logits, distribution).clamp(min=1e-6).log().mean()


def overlap(logits: Tensor, distribution: Tensor) -> Tensor:
    """One minus the total variation distance of both distributions, ``[..]``."""
    return torch.minimum(distribution, logits.float().softmax(-1)).sum(-1)


def loss(distributions: Distributions, criterion: Criterion) -> Tensor:
    """Sum over steps or heads, later ones counting less."""
    total = sum(DECAY**i * criterion(*pair) for i, pair in enumerate(distributions.pairs))
    assert isinstance(total, Tensor)
    return total if distributions.drift is None else total + REGRESSION * distributions.drift


def acceptance(distributions: Distributions) -> Tensor:
    """Mean overlap of all steps or heads."""
    return torch.stack([overlap(*pair).mean() for pair in distributions.pairs]).mean()


def draft_model_distributions(model: Any, ids: Tensor, teacher: Any) -> Distributions:
    """The same distribution at every token."""
    return Distributions([(model(ids, use_cache=False).logits, teacher.logits.float().softmax(-1))])


def medusa_distributions(heads: MedusaHeads, ids: Tensor, teacher: Any) -> Distributions:
    """Head i at token t learns the target's distribution at token t + 1 + i."""
    logits, distribution = heads(teacher.hidden_states[-1]), teacher.logits.float().softmax(-1)
    return Distributions([(logits[:, : -1 - i, i], distribution[:, 1 + i :]) for i in range(len(heads))])


class Steps:
    """Keys and values of all steps so far, as a cache hands them out."""

    def __init__(self) -> None:
        """Begin without any."""
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Add a step's and return all of the layer, side by side."""
        new = (keys, values)
        if layer in self.held:
            new = torch.cat([self.held[layer][0], keys], 2), torch.cat([self.held[layer][1], values], 2)
        self.held[layer] = new
        return new


def feature_distributions(head: FeatureHead, ids: Tensor, teacher: Any) -> Distributions:
    """Several steps of the head from every token, each from its own last feature, as when it drafts.

    At step s row i continues the text from pair i: it reads token i + 1 + s, attends to the target's features up to i
    and to its own of the steps since, and learns the target's distribution at token i + 1 + s.
    """
    pairs = ids.shape[1] - 1
    hidden = torch.cat([teacher.hidden_states[level] for level in head.levels], -1)
    features, tokens = head.fuse(hidden[:, :-1]), ids[:, 1:]
    place = torch.arange(pairs, device=ids.device)
    own = torch.eye(pairs, dtype=torch.bool, device=ids.device)
    seen, cache = place <= place[:, None], Steps()
    distribution = teacher.logits.float().softmax(-1)
    distribution = distribution if head.token_map is None else distribution[..., head.token_map.long()]
    distributions, drift = [], torch.zeros((), device=ids.device)
    for step in range(STEPS):
        known = pairs - step
        shown = torch.nn.functional.pad(tokens[:, step:], (0, step))
        features = head(shown, features, (place + step)[None], seen[None, None], cache)
        distributions.append((head.logits(features[:, :known]), distribution[:, 1 + step :]))
        if isinstance(head, EagleHead):
            state = teacher.hidden_states[-1][:, 1 + step :].float()
            drift = drift + DECAY**step * smooth_l1_loss(features[:, :known].float(), state)
        seen = torch.cat([seen, own], 1)
    return Distributions(distributions, drift if isinstance(head, EagleHead) else None)


def block_distributions(head: DFlashHead, ids: Tensor, teacher: Any) -> Distributions:
    """Blocks behind every `STRIDE`-th token of each text, in one forward.

    A block knows its first token and the features of those before it, and no other block. Its d-th drafted token learns
    the target's distribution of that token.
    """
    batch, length = ids.shape
    hidden = torch.cat([teacher.hidden_states[level] for level in head.levels], -1)
    place = torch.arange(length, device=ids.device)
    first = place[1 : length - head.longest : STRIDE]  # known tokens
    tokens = head.masked(ids[:, first].reshape(-1, 1), head.longest).view(batch, -1)
    offsets = place[: tokens.shape[1] // len(first)]
    block = torch.arange(len(first), device=ids.device).repeat_interleave(len(offsets))
    seen = torch.cat([place < first[block, None], block == block[:, None]], 1)
    cache = Steps()
    head.remember(head.fuse(hidden), place[None], cache)
    rows = head(tokens, (first[:, None] + offsets).view(1, -1), seen[None, None], cache)
    drafting = rows.view(batch, len(first), len(offsets), -1)[:, :, len(offsets) - head.longest :]
    logits, distribution = head.logits(drafting), teacher.logits.float().softmax(-1)
    distribution = distribution if head.token_map is None else distribution[..., head.token_map.long()]
    return Distributions([(logits[:, :, d], distribution[:, first + d]) for d in range(head.longest)])
