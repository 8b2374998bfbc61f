"""REST (He et al.): what followed the same words in a datastore, as a tree of the most frequent continuations."""

from __future__ import annotations

from collections import Counter

from specdec_kernels import tree_from_sequences

from ..datastore import Datastore
from ..sequences import Sequences
from .base import MOST_NODES, Draft, Drafter, padded


class Retrieval(Drafter):
    """Looks the end of each text up in a `Datastore`, the longest one that occurs there.

    Each beginning of what followed is a candidate, and those that followed most often make the tree. A candidate is
    never more frequent than its parent, so that the most frequent ones, in the order found, are a tree.
    """

    rules = ("match", "greedy", "typical", "target_only", "recursive")

    def __init__(self, store: Datastore, *, candidates: int = 24, shortest: int = 2, hits: int = 48) -> None:
        """Look up in `store`.

        Args:
            store: of the target's tokens.
            candidates: most nodes of a tree besides its root, at most 1023.
            shortest: an end of fewer tokens is not looked up.
            hits: most places in the store whose continuations are counted.

        Raises:
            ValueError: a number below 1, or too many candidates.
        """
        for name, value in (("candidates", candidates), ("shortest", shortest), ("hits", hits)):
            if value < 1:
                raise ValueError(f"Retrieval: {name} must be at least 1, got {value}")
        if candidates >= MOST_NODES:
            raise ValueError(f"Retrieval: candidates must be at most {MOST_NODES - 1}, got {candidates}")
        self.store, self.candidates, self.shortest, self.hits = store, candidates, shortest, hits

    def nodes(self, length: int) -> int:
        """The root and the candidates."""
        return 1 + self.candidates

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """Count the beginnings of what followed."""
        kept = [self._most_frequent(row, length) for row in sequences.rows]
        most = max(map(len, kept))
        paths = [path for found in kept for path in [*found, *[()] * (most - len(found))]]
        candidates = padded(paths, sequences.tokens.device, length).view(sequences.batch, most, length)
        tree = tree_from_sequences(candidates, num_nodes=1 + most)
        return Draft(tree.token_ids, parents=tree.parents, max_depth=length, lengths=list(map(len, kept)))

    def _most_frequent(self, row: list[int], length: int) -> list[tuple[int, ...]]:
        followed = self.store.continuations(row, length=length, shortest=self.shortest, most=self.hits)
        count = Counter(tuple(tokens[:n]) for n in range(1, length + 1) for tokens in followed if len(tokens) >= n)
        return [path for path, _ in count.most_common(self.candidates)]  # of equals the first, which is the shortest
