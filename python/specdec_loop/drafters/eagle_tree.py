"""EAGLE-1: a tree of fixed shape whose children are drawn without replacement from the head's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Sampling

from ..heads import FeatureHead
from ..sequences import Sequences
from .base import Draft
from .feature_drafter import FeatureDrafter
from .fixed_tree import FixedTree, Paths, in_preorder

CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0), (0, 0, 0, 0, 0))


class GrownTree(FeatureDrafter):
    """Grows a tree of a known shape, depth by depth."""

    def _grow(self, shape: Shape, sequences: Sequences) -> Draft:
        """One forward a depth."""
        token_ids, logits = [sequences.last(1)], []
        features = self._run_unseen(sequences)
        for depth, level in enumerate(shape.levels):
            logits.append(self._logits(features))
            drawn = self._draw(logits[-1].flatten(0, 1), sequences, depth, level.width, level.lanes)
            token_ids.append(self._of_running(drawn.token_ids.view(sequences.batch, -1), sequences))
            if depth + 1 < len(shape.levels):
                parents = level.parents.expand(sequences.batch, -1) if depth else None
                going = token_ids[-1]
                going = going[:, level.going] if isinstance(level.going, slice) else going.index_select(1, level.going)
                features = self._run_nodes(going, parents, features)
        drawn_ids = torch.cat(token_ids, 1)
        ids = drawn_ids if shape.nodes is None else drawn_ids.index_select(1, shape.nodes)
        if not self._is_drawn:
            return Draft(ids, parents=shape.parents, max_depth=len(shape.levels))
        drafted = torch.cat(logits, 1)
        every = drafted.new_empty(sequences.batch, ids.shape[1], drafted.shape[2])  # rows of leaves are not read
        every.index_copy_(1, shape.inner, drafted)
        return Draft(
            ids,
            every,
            sampling=self._distribution,
            token_map=self.head.token_map,
            parents=shape.parents,
            max_depth=len(shape.levels),
        )


class EagleTree(FixedTree["Shape"], GrownTree):
    """Grows the tree depth by depth: one forward of the head for all nodes of a depth that have children.

    Under ``recursive`` and ``traversal`` the children of a node are the first of one race on the head's distribution,
    which are draws without replacement. Under ``match`` the race runs on the target's noise, so that equal
    distributions choose equal tokens; under the other rules the children are the likeliest tokens.
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
        FixedTree.__init__(self, choices, Shape)
        GrownTree.__init__(self, head, sampling=sampling)
        held = set(self.choices)
        for path in self.choices:
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in held:
                raise ValueError(
                    f"EagleTree: a drawn sibling cannot be left out, but {list(path)} has no elder brother"
                )

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """The paths that are not longer."""
        return self._grow(self._shape(length, sequences), sequences)


class _Level(NamedTuple):
    """Children of one depth, and the nodes above that have them.

    Attributes:
        lanes: ranks of those nodes among all of their depth, for each request; None: there is one.
        width: most children of one of them, and so ids that are drawn for each.
        going: numbers, among the drawn ids, of the children that have children; of neighbours a view, which costs a
            step nothing.
        parents: of these, the number of the parent among those nodes.
    """

    lanes: Tensor | None
    width: int
    going: Tensor | slice
    parents: Tensor


class Shape:
    """A tree of fixed shape, for a batch."""

    def __init__(self, choices: Paths, sequences: Sequences) -> None:
        """Plan the levels of the tree of these paths."""
        device = sequences.tokens.device
        numbers = partial(torch.tensor, dtype=torch.int64, device=device)
        paths, self.parents = in_preorder(choices, sequences)
        depths = [[path for path in paths if len(path) == depth] for depth in range(1 + max(map(len, paths)))]
        having = {path[:-1] for path in choices}
        self.levels: list[_Level] = []
        columns, count = dict.fromkeys(paths[:1], 0), 1  # places among the root and all drawn ids
        for above, below in pairwise(depths):
            inner = [path for path in above if path in having]
            width = 1 + max(path[-1] for path in below)
            places = [inner.index(path[:-1]) * width + path[-1] for path in below]
            going = [place for place, path in zip(places, below, strict=True) if path in having]
            span = range(min(going, default=0), max(going, default=-1) + 1)
            self.levels.append(
                _Level(
                    numbers([above.index(path) for path in inner] * sequences.batch) if len(inner) > 1 else None,
                    width,
                    slice(span.start, span.stop) if going == list(span) else numbers(going),
                    numbers([place // width for place in going]),
                )
            )
            columns |= {path: count + place for place, path in zip(places, below, strict=True)}
            count += len(inner) * width
        nodes = [columns[path] for path in paths]
        self.nodes = None if nodes == list(range(count)) else numbers(nodes)
        self.inner = numbers([paths.index(path) for level in depths for path in level if path in having])
