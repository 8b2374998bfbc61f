"""Medusa (Cai et al.) and blockwise parallel decoding (Stern et al.): heads that look several tokens ahead at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import SampleResult, Sampling

from ..heads import MedusaHeads
from ..sequences import Sequences
from .base import Draft, Drafter, Outcome, Part, kept_rows
from .fixed_tree import FixedTree, Paths, in_preorder
from .marginals import MarginalTree
from .races import PositionRaces, with_runners_up

CHOICES = ((0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0),
           (1, 0, 0), (0, 0, 0, 0))  # fmt: skip


class _StateDrafter(Drafter):
    """Knows the target's state before the last token of each text, from which all heads predict."""

    features = (-1,)

    def __init__(self, heads: MedusaHeads) -> None:
        """Draft with `heads`, on the target's device."""
        self.heads, self.networks = heads, heads.networks

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Note the distribution of a race under ``match``; elsewhere the likeliest tokens are wanted."""
        cold = Sampling(temperature=torch.zeros(sequences.batch, dtype=torch.float32, device=sequences.tokens.device))
        self._positions = PositionRaces(with_runners_up(sampling if rule == "match" else cold, sequences), sequences)
        some = next(self.heads.parameters())
        self._state = some.new_zeros(sequences.batch, some.shape[-1])  # of a prompt of one token there is none

    def prefill(self, sequences: Sequences, hidden: Tensor | None) -> None:
        """Take the state before each prompt's last token."""
        assert hidden is not None
        self._state = kept_rows(hidden, (sequences.lengths - 2).clamp(min=0))[:, 0]

    def join(self, sequences: Sequences, parts: Sequence[Part]) -> None:
        """Take the states."""
        self._state = torch.cat([part.rows(part.drafter._state) for part in parts])

    def commit(self, sequences: Sequences, outcome: Outcome) -> None:
        """Take the state of the last accepted token."""
        assert outcome.hidden is not None
        if outcome.hidden.shape[1] == 1:
            self._state = outcome.hidden[:, 0]
            return
        last = outcome.followers if outcome.path is None else outcome.path.amax(1)  # a path rises, and ends with -1
        self._state = kept_rows(outcome.hidden, last.clamp(min=0).long())[:, 0]

    def _drawn(self, sequences: Sequences, heads: int, count: int) -> SampleResult:
        """The `count` best tokens of the first heads, rows ``[batch * heads]``."""
        return self._positions.best(self.timed(self.heads, self._state, heads), sequences, count)


class Blockwise(_StateDrafter):
    """Drafts a chain: the best token of each head.

    Rule ``greedy`` is Stern et al.'s exact acceptance; ``topm`` and ``distance`` are their approximate ones, with
    ``top_m``, ``max_distance`` and ``min_block`` among the `rule_options` of `generate`.
    """

    rules = ("greedy", "topm", "distance", "match", "typical")

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """All heads at once."""
        return Draft(self._drawn(sequences, min(length, len(self.heads)), 1).token_ids.view(sequences.batch, -1))


class Medusa(FixedTree["_Shape"], _StateDrafter):
    """Drafts a tree of fixed shape: a node at depth d of rank r is the r-th best token of head d."""

    rules = ("greedy", "typical", "match", "target_only", "recursive")

    def __init__(self, heads: MedusaHeads, choices: Sequence[Sequence[int]] = CHOICES) -> None:
        """Choose the shape.

        Args:
            heads: on the target's device.
            choices: paths of child ranks, see `tree_from_paths`; none longer than there are heads.

        Raises:
            ValueError: no tree, or one deeper than there are heads.
        """
        FixedTree.__init__(self, choices, _Shape)
        _StateDrafter.__init__(self, heads)
        if self.depth > len(heads):
            raise ValueError(f"Medusa: choices must be paths of at most {len(heads)} heads, got {self.depth}")

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """All heads at once, spread over the tree."""
        shape = self._shape(length, sequences)
        best = self._drawn(sequences, shape.depth, shape.width).token_ids.view(sequences.batch, -1)
        spread = best.index_select(1, shape.chosen)
        return Draft(torch.cat([sequences.last(1), spread], 1), parents=shape.parents, max_depth=shape.depth)


class MedusaBestTree(_StateDrafter, MarginalTree):
    """Drafts the likeliest tree of the heads' best tokens, another one in each step."""

    def __init__(self, heads: MedusaHeads, *, width: int = 4, total: int = 12) -> None:
        """Choose the sizes.

        Args:
            heads: on the target's device.
            width: see `MarginalTree`.
            total: likewise.

        Raises:
            ValueError: sizes that do not fit.
        """
        _StateDrafter.__init__(self, heads)
        MarginalTree.__init__(self, depth=len(heads), width=width, total=total)


class _Shape:
    """A tree of fixed shape, for a batch."""

    def __init__(self, choices: Paths, sequences: Sequences) -> None:
        (_, *paths), self.parents = in_preorder(choices, sequences)
        self.depth, self.width = max(map(len, choices)), 1 + max(map(max, choices))
        chosen = [(len(path) - 1) * self.width + path[-1] for path in paths]  # by each node, of all heads' best
        self.chosen = torch.tensor(chosen, device=sequences.tokens.device)
