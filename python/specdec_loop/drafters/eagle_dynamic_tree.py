"""EAGLE-2 and EAGLE-3: a tree that grows where the head is confident, and of which the best nodes are kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec_kernels import Sampling, select_tree

from ..heads import FeatureHead
from ..sequences import Sequences
from .base import COLD, MOST_NODES, Draft
from .eagle_tree import GrownTree, Shape
from .fixed_tree import Paths

# Chance that the best of a race is the target's token, and of each further rank beside the one before it.
FIRST, NEXT = 0.6, 0.35
MOST = MOST_NODES - 1  # besides the root


class EagleDynamicTree(GrownTree):
    """Expands the `width` likeliest paths of each depth by `width` children, and keeps the best nodes of all.

    A path's score is the product of the head's probabilities along it. Under ``match`` the candidates of a sampled
    request are the first of the race that the target will run, on the head's distribution, and count by rank: where all
    requests are such, and no filter may leave a rank out, the tree is the same in every step (`likely_paths`). Either
    way they are deterministic, and so are kept or dropped without bias.
    """

    rules = ("match", "greedy", "typical", "target_only")

    def __init__(
        self,
        head: FeatureHead,
        *,
        width: int = 4,
        total: int = 12,
        sampling: Sampling | None = None,
        confidence: float = 0.0,
    ) -> None:
        """Choose the sizes.

        Args:
            head: on the target's device.
            width: paths expanded at each depth, and children of each. A tree grows no deeper than 1023 candidates
                reach: of width 16 four deep, of 10 eleven.
            total: most drafted nodes of a step.
            sampling: see `FeatureDrafter`.
            confidence: grow no deeper where the best paths have a smaller chance, see `Confidence`; above 0 each depth
                waits for the device.

        Raises:
            ValueError: sizes not in [1, 1023], or a confidence not in [0, 1).
        """
        super().__init__(head, sampling=sampling, confidence=confidence)
        for name, value in (("width", width), ("total", total)):
            if not 1 <= value <= MOST:
                raise ValueError(f"EagleDynamicTree: {name} must be in [1, {MOST}], got {value}")
        self.width, self.total = width, total
        self._deepest = 1 + (MOST - width) // width**2

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Note which requests race with the target's noise: there a token's rank tells more than its probability."""
        super().begin(sequences, rule=rule, sampling=sampling, longest=longest)
        warm = self._race.temperature
        is_sampled = sequences.lengths > 0 if warm is None else warm > COLD
        self._counts_by_rank = (is_sampled & (rule == "match"))[:, None, None]
        self._by_rank = int(self._counts_by_rank.sum())  # so many requests
        self._is_known = self._by_rank == sequences.batch and not self._race.has_filters  # the tree
        self._shapes: dict[int, Shape] = {}  # of each length
        device, rank = sequences.tokens.device, torch.arange(self.width, device=sequences.tokens.device)
        self._chances = math.log(FIRST) + rank.float() * math.log(NEXT)
        self._zero = torch.zeros(sequences.batch, 1, dtype=torch.float32, device=device)
        # Parents of the root, of depth 1, and of depth 2: nodes of depth 1 are expanded all.
        first = [-1, *[0] * self.width, *(1 + rank).repeat_interleave(self.width).tolist()]
        self._first = torch.tensor(first, device=device).repeat(sequences.batch, 1)
        # Number of the first node of the depth of each node that is expanded, from depth 2 on.
        begins = 1 + self.width + self.width**2 * torch.arange(longest, device=device)
        self._depth_begins = begins.repeat_interleave(self.width)
        # Of the parent of each child of a depth.
        self._row = rank.repeat_interleave(self.width).expand(sequences.batch, -1)

    def nodes(self, length: int) -> int:
        """The root and what is kept of all candidates."""
        return 1 + min(self.total, self.width + (length - 1) * self.width**2)

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """Expand `length` times, then select."""
        if self._is_known:
            return self._grow(self._known_shape(length, sequences), sequences)
        width = self.width
        self._confidence.start(sequences)
        features = self._run_unseen(sequences)
        ids, scores = self._children(features, sequences, 0)  # of the last depth; of one parent, the best comes first
        token_ids, every_score = [sequences.last(1), ids], [self._zero, scores]
        expanded: list[Tensor] = []  # of the depths from 2 on: which nodes of theirs
        best_scores, depths = scores, 1  # of what is expanded
        for depth in range(1, min(length, self._deepest)):
            if depth > 1:
                best_scores, best = scores.topk(width, 1)
            if self._confidence.least > 0 and self._confidence.is_below([row[0] for row in best_scores.tolist()]):
                break
            if depth == 1:
                features = self._run_nodes(ids, None, features)
            else:
                features = self._run_nodes(ids.gather(1, best), self._row.gather(1, best), features)
                expanded.append(best)
            depths += 1
            ids, scores = self._children(features, sequences, depth, best_scores)
            token_ids.append(ids)
            every_score.append(scores)
        tree = select_tree(
            torch.cat(token_ids, 1),
            self._parents(expanded, depths),
            torch.cat(every_score, 1),
            num_nodes=self.nodes(depths),
        )
        return Draft(tree.token_ids, parents=tree.parents, max_depth=depths)

    def _parents(self, expanded: list[Tensor], depths: int) -> Tensor:
        """Of all nodes, where of the depths from 2 on these were expanded."""
        if not expanded:
            return self._first[:, : 1 + self.width * (1 if depths == 1 else 1 + self.width)].contiguous()
        every = expanded[0] if len(expanded) == 1 else torch.cat(expanded, 1)
        parents = every + self._depth_begins[: every.shape[1]]
        below = parents[:, :, None].expand(-1, -1, self.width).flatten(1)
        return torch.cat([self._first, below], 1)

    def _known_shape(self, length: int, sequences: Sequences) -> Shape:
        """The tree that ranks alone choose, as deep as `draft` would grow it."""
        if length not in self._shapes:
            depth = 1
            while depth < length and FIRST**depth >= self._confidence.least:
                depth += 1
            self._shapes[length] = Shape(likely_paths(self.width, self.total, depth), sequences)
        return self._shapes[length]

    def _children(
        self, features: Tensor, sequences: Sequences, ahead: int, scores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The best tokens after each feature and their paths' scores in logarithms, ``[batch, paths * width]``."""
        batch, rows = features.shape[:2]
        drawn = self._draw(self._logits(features).flatten(0, 1), sequences, ahead, self.width)
        ids = self._of_running(drawn.token_ids.view(batch, rows * self.width), sequences)
        if self._by_rank == batch:
            chances = self._chances.expand(batch, rows, -1)
        else:
            chances = drawn.logprobs.view(batch, rows, self.width)
            if self._by_rank:
                chances = torch.where(self._counts_by_rank, self._chances, chances)
        if scores is not None:
            chances = chances + scores[:, :, None]
        return ids, chances.flatten(1)

    def _rows(self, longest: int) -> int:
        return longest + 1 + longest * self.width


def likely_paths(width: int, total: int, depth: int) -> Paths:
    """The `total` likeliest paths of ranks, where the `width` likeliest of each depth have `width` children each.

    Example:
        >>> from specdec_loop.drafters.eagle_dynamic_tree import likely_paths
        >>> likely_paths(2, 5, 3)
        [(0,), (0, 0), (0, 0, 0), (1,), (0, 1)]
    """

    def chance(path: tuple[int, ...]) -> float:
        return len(path) * math.log(FIRST) + sum(path) * math.log(NEXT)

    every: list[tuple[int, ...]] = []
    best: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        below = sorted(((*path, rank) for path in best for rank in range(width)), key=chance, reverse=True)
        every += below
        best = below[:width]
    return sorted(every, key=chance, reverse=True)[:total]
