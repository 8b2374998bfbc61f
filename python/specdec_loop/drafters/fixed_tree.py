"""Trees whose shape is chosen once: which ranks are drafted behind which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from specdec_kernels import tree_from_paths

from ..sequences import Sequences

Shape = TypeVar("Shape")
Paths = Sequence[tuple[int, ...]]


class FixedTree(Generic[Shape]):
    """Paths of child ranks, and what a drafter plans from those that are not longer than a draft may be."""

    def __init__(self, choices: Sequence[Sequence[int]], plan: Callable[[Paths, Sequences], Shape]) -> None:
        """Take paths of child ranks, see `tree_from_paths`, and what plans some of them for a batch.

        Raises:
            ValueError: no tree.
        """
        tree_from_paths(choices)
        self.choices = [tuple(path) for path in choices]
        self.depth = max(map(len, self.choices))
        self._plan = plan
        self._shapes: dict[tuple[int, int], Shape] = {}  # by length and batch

    def nodes(self, length: int) -> int:
        """The root and the paths."""
        return 1 + len(self._paths(length))

    def _paths(self, length: int) -> list[tuple[int, ...]]:
        return [path for path in self.choices if len(path) <= length]

    def _shape(self, length: int, sequences: Sequences) -> Shape:
        """The plan for a batch, made once."""
        key = length, sequences.batch
        if key not in self._shapes:
            self._shapes[key] = self._plan(self._paths(length), sequences)
        return self._shapes[key]


def in_preorder(choices: Paths, sequences: Sequences) -> tuple[list[tuple[int, ...]], Tensor]:
    """Paths of a tree's nodes from the root on, a node's descendants right behind it, and parents for a batch.

    A path of first children, which is often the accepted one, are then neighbours: their rows are in place.
    """
    paths = sorted([(), *choices])
    number = {path: i for i, path in enumerate(paths)}
    parents = torch.tensor([-1, *(number[path[:-1]] for path in paths[1:])], dtype=torch.int32)
    return paths, parents.to(sequences.tokens.device).repeat(sequences.batch, 1)
