"""Masks of requests of the same length: views of one that is kept, so that a step makes none."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import tree_mask

MOST_NODES = 64  # of a mask that is kept: it has as many rows, of twice the capacity
MOST_KEPT = 1 << 22  # elements of a mask of trees


class KeptMasks:
    """Positions and masks of nodes behind rows that they all see.

    On a GPU SDPA wants masks that begin at 16 bytes, and these begin anywhere: they serve CPUs.
    """

    def __init__(self, capacity: int, device: torch.device | str) -> None:
        """Keep nothing yet."""
        self.capacity, self.device = capacity, device
        self._numbers: Tensor | None = None
        self._masks: dict[str, Tensor] = {}
        self._parents: Tensor | None = None  # of the last trees
        self._trees: tuple[Tensor, Tensor] | None = None  # their depths and mask, if they came twice

    def positions(self, first: int, count: int) -> Tensor:
        """The positions from `first` on, ``[1, count]``."""
        if self._numbers is None:
            self._numbers = torch.arange(self.capacity, device=self.device)[None]
        return self._numbers[:, first : first + count]

    def mask(self, kind: str, nodes: int, first: int, dtype: torch.dtype) -> Tensor:
        """An additive mask ``[1, 1, nodes, first + nodes]``.

        What is kept shows its first half, of `capacity` columns, to every node: the view begins `first` columns left of
        the middle.

        Args:
            kind: ``"stairs"``: a node sees itself and those above it; ``"siblings"``: itself.
            nodes: at most `MOST_NODES`.
            first: columns before theirs.
            dtype: always the same.
        """
        kept = self._masks.get(kind)
        if kept is None or kept.shape[2] < nodes:
            key = torch.arange(2 * self.capacity, device=self.device)
            own = self.capacity + torch.arange(nodes, device=self.device)[:, None]
            is_hidden = key > own if kind == "stairs" else (key >= self.capacity) & (key != own)
            shown = torch.zeros(is_hidden.shape, dtype=dtype, device=self.device)
            kept = shown.masked_fill_(is_hidden, torch.finfo(dtype).min)[None, None]
            self._masks[kind] = kept
        return kept[:, :, :nodes, self.capacity - first : self.capacity + nodes]

    def remember(self, parents: Tensor) -> None:
        """Trees whose inputs were made: they may come again."""
        if parents is not self._parents:
            self._parents, self._trees = parents, None

    def trees(self, parents: Tensor, first: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Depths ``[batch, nodes]`` of trees and their additive mask, as `mask`; None unless they came before.

        Args:
            parents: see `specdec_kernels.tree_layout`; the same tensor means the same trees.
            first: columns before theirs.
            dtype: always the same.
        """
        if parents is not self._parents:
            return None
        if self._trees is None:
            if parents.numel() * (self.capacity + MOST_NODES) > MOST_KEPT:
                return None
            seen = tree_mask(parents).mask[:, 0]
            before = seen[:, :, :1].expand(-1, -1, self.capacity)  # who sees the root sees what precedes it
            hidden = ~torch.cat([before, seen], 2)
            shown = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
            shown.masked_fill_(hidden, torch.finfo(dtype).min)
            self._trees = seen.sum(-1) - 1, shown[:, None]
        depth, shown = self._trees
        return depth, shown[:, :, :, self.capacity - first :]
