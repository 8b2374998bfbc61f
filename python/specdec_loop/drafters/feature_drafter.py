"""What all drafters share that continue the target's features: the head's cache, and the pairs it has not seen yet."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import Noise, Sampling, gather_nodes, sample

from ..heads import FeatureHead
from ..text import Text
from ..tree_cache import TreeCache
from .base import Confidence, Drafter, Outcome

DRAWN_RULES = ("ratio", "block", "recursive", "traversal")  # their drafts are drawn from the head's law
COLD = 1e-4  # a temperature so low that a race is won by the largest logits, in their order


class FeatureDrafter(Drafter):
    """Keeps the head's cache in step with the text; what is drafted is its subclasses' affair.

    Row i of the head's cache is the pair (feature i, token i + 1). A text of n tokens, the last of which the target has
    not seen, has n - 1 pairs; those that the last step added are run when a draft begins, as a chain whose last row
    tells the first drafts. Drafted nodes hang from that row and are dropped at the next commit.
    """

    def __init__(self, head: FeatureHead, *, sampling: Sampling | None = None, confidence: float = 0.0) -> None:
        """Draft with `head`.

        Args:
            head: on the target's device.
            sampling: of drafts that are drawn, or that race with the target's noise; None: the target's.
            confidence: end a chain where its chance falls below, see `Confidence`.
        """
        self.head, self.sampling, self.features = head, sampling, head.levels
        self._confidence = Confidence(confidence)

    def begin(self, text: Text, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Make the cache; `prefill` brings the prompts."""
        self._is_drawn, self._law = rule in DRAWN_RULES, self.sampling or sampling
        follows_law = self._is_drawn or rule == "match"
        self._race = with_runners_up(self._law if follows_law else Sampling(temperature=torch.zeros(text.batch)), text)
        some, capacity = next(self.head.parameters()), text.tokens.shape[1] + self._rows(longest)
        self.head.reach(capacity)
        self._cache = TreeCache(
            self.head.config,
            batch=text.batch,
            capacity=capacity,
            dtype=some.dtype,
            device=some.device,
        )
        self._tokens = text.last(1)
        self._features = some.new_zeros(text.batch, 1, self.head.config.hidden_size)
        self._new = torch.zeros_like(text.lengths)

    def prefill(self, text: Text, hidden: Tensor) -> None:
        """Run the prompts' pairs but for their last."""
        features = self.head.fuse(hidden)
        count = text.longest - 2
        if count > 0:
            positions = torch.arange(count, device=features.device)[None]
            self.head(text.tokens[:, 1 : 1 + count], features[:, :count], positions, cache=self._cache)
            self._cache.commit((text.lengths - 3).clamp(min=-1).int())
        last = (text.lengths - 2).clamp(min=0)[:, None, None]
        self._features = features.gather(1, last.expand(-1, -1, features.shape[2]))
        self._new = (text.lengths > 1).long()

    def commit(self, text: Text, outcome: Outcome) -> None:
        """Keep the pairs run in this step, and note those that it adds."""
        assert outcome.hidden is not None
        self._cache.commit((self._new - 1).int())
        hidden = outcome.hidden if outcome.path is None else gather_nodes(outcome.hidden, outcome.path).values
        self._features, self._new = self.head.fuse(hidden), outcome.kept.long()
        place = (text.lengths - self._new)[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
        self._tokens = text.tokens.gather(1, place.clamp(max=text.tokens.shape[1] - 1))

    def _run_pairs(self) -> tuple[Tensor, Tensor]:
        """Run the new pairs; their last features ``[batch, 1, hidden]`` and its row ``[batch, 1]``."""
        chain = torch.arange(self._tokens.shape[1], device=self._tokens.device)
        parents = torch.where((chain < self._new[:, None]) | (chain == 0), chain - 1, -1)
        self._inputs = self._cache.tree_inputs(parents)
        out = self._run(self._tokens, self._features)
        last = (self._new - 1).clamp(min=0)[:, None]
        return out.gather(1, last[:, :, None].expand(-1, -1, out.shape[2])), last

    def _run_nodes(self, token_ids: Tensor, features: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Run drafted tokens whose parents are rows of the last run; the next features and their rows."""
        self._inputs = self._cache.child_inputs(self._inputs, parents)
        rows = torch.arange(token_ids.shape[1], device=parents.device).expand_as(parents)
        return self._run(token_ids, features), rows

    def _run(self, token_ids: Tensor, features: Tensor) -> Tensor:
        inputs = self._inputs
        out: Tensor = self.head(
            token_ids, features, inputs["position_ids"], inputs["attention_mask"], inputs["past_key_values"]
        )
        return out

    def _draw(self, logits: Tensor, text: Text, ahead: int, count: int, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """The `count` best ids of a race on each row.

        Args:
            logits: ``[batch, rows, draft_vocab]``.
            text: names the noise.
            ahead: how far the drawn tokens are from the next one.
            count: ids a row.
            ranks: ``[rows]``: rank of each row's node in its depth.

        Returns:
            Target ids ``[batch, rows, count]``, -1 where the law has fewer or where there is no pair to draft from; and
            their log-probabilities at temperature 1.
        """
        batch, rows = logits.shape[:2]
        noise, law = text.noise(ahead), self._race
        if rows > 1:
            noise = Noise(*(None if x is None else x.repeat_interleave(rows) for x in noise))  # type: ignore[arg-type]
            law = Sampling(*(None if x is None else x.repeat_interleave(rows) for x in law))
        drawn = sample(
            logits.flatten(0, 1),
            sampling=law,
            noise=noise,
            purpose="draft" if self._is_drawn else "target",
            num_samples=count,
            lane=ranks.repeat(batch) if self._is_drawn else 0,
            token_map=self.head.token_map,
            logprobs="raw",
        )
        ids = drawn.token_ids.view(batch, rows, count).masked_fill(self._new[:, None, None] == 0, -1)
        return ids, drawn.logprobs.view(batch, rows, count)

    def _rows(self, longest: int) -> int:
        """Most rows written between two commits: the new pairs and the drafted nodes."""
        return 2 * self.nodes(longest)


def with_runners_up(law: Sampling, text: Text) -> Sampling:
    """The law for a race whose runners-up are wanted too: where it is an argmax, the largest logits in order."""
    device = text.tokens.device
    if law.temperature is None:
        return law
    temperature = law.temperature.to(device)
    is_argmax = temperature < COLD
    return Sampling(
        temperature=temperature.clamp(min=COLD),
        top_k=None if law.top_k is None else torch.where(is_argmax, 0, law.top_k),
        top_p=None if law.top_p is None else torch.where(is_argmax, 1.0, law.top_p),
        min_p=None if law.min_p is None else torch.where(is_argmax, 0.0, law.min_p),
    )
