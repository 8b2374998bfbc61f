"""EAGLE-1: a tree of fixed shape whose children are drawn without replacement from the head's law."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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

    def draft(self, text: Text, length: int) -> Draft:
        """One forward a depth."""
        tree = tree_from_paths([path for path in self.choices if len(path) <= length])
        parents, depths = tree.parents.tolist(), tree.depth.tolist()
        device, nodes = text.tokens.device, len(parents)
        token_ids = torch.full((text.batch, nodes), -1, dtype=torch.int64, device=device)
        token_ids[:, :1] = text.last(1)
        inner = sorted(set(parents[1:]))
        features = self._run_unseen(text)
        logits = None
        for depth in range(max(depths)):
            level = [n for n in range(nodes) if depths[n] == depth]
            rows = [n for n in level if n in inner]
            children = [[n for n in range(nodes) if parents[n] == row] for row in rows]
            row_logits = self.head.logits(features)
            if self._is_drawn:
                logits = row_logits.new_zeros(text.batch, nodes, row_logits.shape[2]) if logits is None else logits
                logits[:, rows] = row_logits
            ranks = torch.tensor([level.index(row) for row in rows], device=device)
            drawn = self._draw(row_logits.flatten(0, 1), text, depth, max(map(len, children)), ranks)
            ids = self._of_running(drawn.token_ids.view(text.batch, len(rows), -1), text)
            for r, born in enumerate(children):
                token_ids[:, born] = ids[:, r, : len(born)]
            going = [(r, n) for r, born in enumerate(children) for n in born if n in inner]
            if going:
                source = torch.tensor([r for r, _ in going], device=device)
                chosen = token_ids[:, [n for _, n in going]]
                rows_of_parents = source.expand(text.batch, -1) if depth else None
                features = self._run_nodes(chosen, rows_of_parents, features[:, source])
        return Draft(
            token_ids,
            logits,
            sampling=self._law if self._is_drawn else None,
            token_map=self.head.token_map if self._is_drawn else None,
            parents=tree.parents.to(device).repeat(text.batch, 1),
            max_depth=max(depths),
        )
