"""EAGLE-1: a tree of fixed shape whose children are drawn without replacement from the head's law."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Sampling, tree_from_paths

from ..heads import FeatureHead
from ..text import Text
from .base import Draft
from .feature_drafter import FeatureDrafter

CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0), (0, 0, 0, 0, 0))


class EagleTree(FeatureDrafter):
    """Grows the tree depth by depth: one forward of the head for all nodes of a depth that have children.

    Under ``recursive`` and ``traversal`` the children of a node are the first of one race on the head's law, which are
    draws without replacement. Under ``match`` the race runs on the target's noise, so that equal laws choose equal
    tokens; under the other rules the children are the likeliest tokens.
    """

    rules = ("recursive", "traversal", "match", "greedy", "typical", "target_only")

    def __init__(
        self, head: FeatureHead, choices: Sequence[Sequence[int]] = CHOICES, *, sampling: Sampling | None = None
    ) -> None:
        """Choose the shape.

        Args:
            head: on the target's device.
            choices: paths of child ranks, see `tree_from_paths`; the ranks of siblings are 0, 1, ...
            sampling: see `FeatureDrafter`.

        Raises:
            ValueError: no tree, or siblings that leave out a rank.
        """
        super().__init__(head, sampling=sampling)
        self.choices = [tuple(path) for path in choices]
        tree_from_paths(self.choices)
        held = set(self.choices)
        for path in self.choices:
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in held:
                raise ValueError(
                    f"EagleTree: a drawn sibling cannot be left out, but {list(path)} has no elder brother"
                )

    def nodes(self, length: int) -> int:
        """The root, and the paths that are not longer than a draft may be."""
        return 1 + sum(len(path) <= length for path in self.choices)

    def begin(self, text: Text, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Forget shapes of another batch."""
        super().begin(text, rule=rule, sampling=sampling, longest=longest)
        self._shapes: dict[int, _Shape] = {}

    def draft(self, text: Text, length: int) -> Draft:
        """One forward a depth."""
        if length not in self._shapes:
            self._shapes[length] = _Shape([p for p in self.choices if len(p) <= length], text)
        shape = self._shapes[length]
        token_ids, logits = [text.last(1)], []
        features = self._run_unseen(text)
        for depth, level in enumerate(shape.levels):
            logits.append(self._logits(features))
            drawn = self._draw(logits[-1].flatten(0, 1), text, depth, level.width, level.ranks)
            ids = self._of_running(drawn.token_ids.view(text.batch, -1, level.width), text)
            token_ids.append(ids[:, level.parent, level.rank])
            if len(level.going):
                rows = level.parent[level.going]
                chosen = token_ids[-1][:, level.going]
                features = self._run_nodes(chosen, rows.expand(text.batch, -1) if depth else None, features[:, rows])
        ids = torch.cat(token_ids, 1)
        if not self._is_drawn:
            return Draft(ids, parents=shape.parents, max_depth=len(shape.levels))
        drafted = torch.cat(logits, 1)
        every = drafted.new_zeros(text.batch, ids.shape[1], drafted.shape[2])
        every[:, shape.inner] = drafted
        return Draft(
            ids,
            every,
            sampling=self._law,
            token_map=self.head.token_map,
            parents=shape.parents,
            max_depth=len(shape.levels),
        )


class _Level(NamedTuple):
    """Children of one depth, and the nodes above that have them.

    Attributes:
        ranks: of those nodes among all of their depth.
        width: most children of one of them.
        parent: of each child, the number of its parent among those nodes.
        rank: of each child among its siblings.
        going: children that have children.
    """

    ranks: Tensor
    width: int
    parent: Tensor
    rank: Tensor
    going: Tensor


class _Shape:
    """A tree of fixed shape, for a batch."""

    def __init__(self, choices: Sequence[tuple[int, ...]], text: Text) -> None:
        device = text.tokens.device
        self.parents = tree_from_paths(choices, device=device).parents.repeat(text.batch, 1)
        deepest = max(map(len, choices))
        depths = [[path for path in sorted([(), *choices]) if len(path) == depth] for depth in range(deepest + 1)]
        having = {path[:-1] for path in choices}
        self.levels: list[_Level] = []
        for above, below in pairwise(depths):
            inner = [path for path in above if path in having]
            numbers = (
                [above.index(path) for path in inner],
                [inner.index(path[:-1]) for path in below],
                [path[-1] for path in below],
                [i for i, path in enumerate(below) if path in having],
            )
            ranks, parent, rank, going = (torch.tensor(n, dtype=torch.int64, device=device) for n in numbers)
            self.levels.append(_Level(ranks, 1 + max(path[-1] for path in below), parent, rank, going))
        flat = [path for level in depths for path in level]
        self.inner = torch.tensor([i for i, path in enumerate(flat) if path in having], device=device)
