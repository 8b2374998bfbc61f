"""Trees whose shape the host knows: Medusa's choices, any parents, the lookahead layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._check import fail


class PathTree(NamedTuple):
    """Result of `tree_from_paths`.

    Attributes:
        parents: int32 ``[nodes]``, as every tree function takes them (after ``.repeat(batch, 1)``).
        ranks: int32 ``[nodes]``: which of its parent's candidates a node is, the last element of its path; the root -1.
        depth: int32 ``[nodes]``: which head a node comes from; the root 0.
    """

    parents: Tensor
    ranks: Tensor
    depth: Tensor

    def tree_indices(self, top_k: int = 10) -> Tensor:
        """Medusa's tree_indices, int64 ``[nodes]``: places in [root | top_k of head 1 | top_k of head 2 | ...].

        Example:
            >>> from specdec_kernels import tree_from_paths
            >>> tree_from_paths([[0], [1], [0, 2]]).tree_indices()
            tensor([ 0,  1,  2, 13])
        """
        place = self.ranks.long() + top_k * (self.depth.long() - 1) + 1
        return torch.where(self.depth == 0, 0, place)


def tree_from_paths(paths: Sequence[Sequence[int]], *, device: torch.device | str = "cpu") -> PathTree:
    """A tree from paths of child ranks: ``(0, 2)`` is the third candidate under the first (Medusa's choices).

    Paths are sorted by (length, elements); node i + 1 is the i-th, node 0 the root.

    Args:
        paths: each a non-empty sequence of ranks >= 0, without repetition; every prefix of a path is a path too.
        device: where the results live.

    Returns:
        PathTree.

    Raises:
        ValueError: an empty path, a negative rank, a repeated path, a prefix that is missing.

    Example:
        >>> from specdec_kernels import tree_from_paths
        >>> tree_from_paths([[0], [1], [0, 0]]).parents
        tensor([-1,  0,  0,  1], dtype=torch.int32)
    """
    listed = list(paths) if isinstance(paths, Iterable) else [paths]
    for path in listed:
        if not isinstance(path, Sequence) or not all(isinstance(rank, int) for rank in path):
            fail("tree_from_paths", "paths", "sequences of ranks, which are ints", repr(path))
    ordered = sorted((tuple(path) for path in listed), key=lambda path: (len(path), path))
    number: dict[tuple[int, ...], int] = {(): 0}
    parents, ranks, depth = [-1], [-1], [0]
    for path in ordered:
        if not path or any(rank < 0 for rank in path):
            fail("tree_from_paths", "paths", "non-empty sequences of ranks >= 0", list(path))
        if path in number:
            fail("tree_from_paths", "paths", "distinct", f"{list(path)} twice")
        if path[:-1] not in number:
            fail("tree_from_paths", "paths", f"closed under prefixes: {list(path[:-1])} is missing", list(path))
        number[path] = len(parents)
        parents.append(number[path[:-1]])
        ranks.append(path[-1])
        depth.append(len(path))
    return PathTree(*(torch.tensor(values, dtype=torch.int32, device=device) for values in (parents, ranks, depth)))


def tree_from_parents(parents: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
    """Parents as a tensor, refused with the reason where they are no tree.

    Args:
        parents: ``parents[0] = -1``, then ``0 <= parents[n] < n``, or -1 for padding.
        device: where the result lives.

    Returns:
        int32 ``[nodes]``.

    Raises:
        ValueError: no root, a parent out of range, a parent that comes after its child, a cycle, a padding parent.

    Example:
        >>> from specdec_kernels import tree_from_parents
        >>> tree_from_parents([-1, 0, 0, 2])
        tensor([-1,  0,  0,  2], dtype=torch.int32)
    """
    name = "tree_from_parents"
    given: Any = parents
    parents = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(parents, Sequence):
        fail(name, "parents", "a sequence of ints", type(parents).__name__)
    for n, parent in enumerate(parents):
        if not isinstance(parent, int):
            fail(name, f"parents[{n}]", "an int", repr(parent))
    nodes = len(parents)
    if nodes == 0 or parents[0] != -1:
        fail(name, "parents[0]", "-1 (the root)", parents[0] if nodes else "nothing")
    for n, parent in enumerate(parents):
        if not -1 <= parent < nodes:
            fail(name, f"parents[{n}]", f"in [-1, {nodes})", parent)
    for n in range(nodes):
        _refuse_cycle(name, parents, n)
    for n, parent in enumerate(parents):
        if parent > n:
            fail(name, f"parents[{n}]", f"less than {n}: a parent comes before its child", parent)
        if parent > 0 and parents[parent] == -1:
            fail(name, f"parents[{n}]", "a node, not padding", parent)
    return torch.tensor(list(parents), dtype=torch.int32, device=device)


def _refuse_cycle(name: str, parents: Sequence[int], first: int) -> None:
    walked = [first]
    while parents[walked[-1]] >= 0:
        walked.append(parents[walked[-1]])
        if walked[-1] == first:
            fail(name, "parents", "without cycle", " -> ".join(map(str, walked)))
        if len(walked) > len(parents):  # runs into a cycle that does not hold `first`: found from there
            return


def tree_from_lookahead(level: int, window: int, guesses: int, *, device: torch.device | str = "cpu") -> Tensor:
    """The layout of lookahead decoding (Fu et al.) as a tree, so that every mask and layout serves it.

    Nodes in the order of the query tokens: ``level - 1`` window rows of `window` tokens, then `guesses` n-grams of
    ``level - 1`` tokens. Token j of row 0 follows token j - 1, token j of row r token j of row r - 1; an n-gram follows
    the last token, which is node 0. Depth is the offset of a token's position from the last token's.

    Args:
        level: N, at least 2.
        window: W, at least 1.
        guesses: G, at least 0.
        device: where the result lives.

    Returns:
        int32 ``[(level - 1) (window + guesses)]`` parents.

    Raises:
        ValueError: values out of range.

    Example:
        >>> from specdec_kernels import tree_from_lookahead
        >>> tree_from_lookahead(3, 2, 1)
        tensor([-1,  0,  0,  1,  0,  4], dtype=torch.int32)
    """
    for argument, value, least in (("level", level, 2), ("window", window, 1), ("guesses", guesses, 0)):
        if value < least:
            fail("tree_from_lookahead", argument, f">= {least}", value)
    parents = list(range(-1, window - 1))
    for row in range(1, level - 1):
        parents += [(row - 1) * window + j for j in range(window)]
    for _ in range(guesses):
        first = len(parents)
        parents += [0, *range(first, first + level - 2)]
    return torch.tensor(parents, dtype=torch.int32, device=device)
