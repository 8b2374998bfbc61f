"""Trees of drafters that predict all positions at once: the likeliest prefixes of their candidates."""

from __future__ import annotations

from specdec_kernels import SampleResult, tree_from_marginals

from ..sequences import Sequences
from .base import MOST_NODES, Draft, Drafter
from .races import PositionRaces

MOST_CANDIDATES = 2048  # of a request that `tree_from_marginals` takes


class MarginalTree(Drafter):
    """The best nodes of all prefixes, see `tree_from_marginals`; a prefix scores the product of its probabilities.

    Under ``match`` the candidates of a sampled request are the first of the race that the target will run. Either way
    they are deterministic, so that leaving some out is no bias.
    """

    rules = ("match", "greedy", "typical", "target_only", "recursive")
    _positions: PositionRaces

    def __init__(self, *, depth: int, width: int, total: int) -> None:
        """Choose the sizes.

        Args:
            depth: positions that can be drafted.
            width: candidates of each position.
            total: most drafted nodes of a step.

        Raises:
            ValueError: sizes below 1, or more than the op takes.
        """
        for name, value, most in (("width", width, 64), ("total", total, MOST_NODES - 1)):
            if not 1 <= value <= most:
                raise ValueError(f"{type(self).__name__}: {name} must be in [1, {most}], got {value}")
        self.depth, self.width, self.total = depth, width, total

    def nodes(self, length: int) -> int:
        """The root and what is kept of all prefixes."""
        prefixes: int = sum(self.width**d for d in range(1, 1 + self._depth(length)))
        return 1 + min(self.total, prefixes)

    def _depth(self, length: int) -> int:
        return min(length, self.depth, self.total, MOST_CANDIDATES // self.width)

    def _drawn(self, sequences: Sequences, positions: int, count: int) -> SampleResult:
        """The `count` best tokens of the first positions, see `PositionRaces.best`."""
        raise NotImplementedError  # of Medusa's heads, of a block

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """All positions at once, then the tree."""
        depth = self._depth(length)
        drawn = self._drawn(sequences, depth, self.width)
        shape = sequences.batch, depth, self.width
        tree = tree_from_marginals(
            drawn.token_ids.view(shape),
            drawn.logprobs.view(shape),
            num_nodes=self.nodes(length),
            root_ids=sequences.last(1)[:, 0].contiguous(),
        )
        return Draft(tree.token_ids, parents=tree.parents, max_depth=depth)
