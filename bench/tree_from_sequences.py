"""tree_from_sequences beside a trie of Python dictionaries, the usual way of REST and of n-gram drafters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specdec_kernels import CandidateTree, tree_from_sequences

from .cases import DEVICE
from .minimum import moved
from .suite import Run
from .trees import TreeCase, shape_cases

QUICK, LENGTH = 1, 8
CASES = shape_cases("tree_from_sequences")


def inputs(case: TreeCase) -> list[Tensor]:
    """Continuations that share prefixes: int64 [batch, sequences, LENGTH]."""
    g = torch.Generator().manual_seed(0)
    size = (case.batch, max(1, (case.nodes - 1) // 4), LENGTH)
    return [(torch.rand(size, generator=g) ** 4 * 8).long().to(DEVICE) for _ in range(2)]


def ours(case: TreeCase, x: Tensor, backend: str) -> CandidateTree:
    """One call of the package."""
    return tree_from_sequences(x, num_nodes=case.nodes, backend=backend)


def minimum(case: TreeCase, x: Tensor, result: CandidateTree) -> int:
    """Bytes of the sequences and of the tree."""
    return moved(x, *result)


def trie(case: TreeCase, x: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids, parents) by a dictionary of prefixes a request."""
    ids = torch.full((len(x), case.nodes), -1)
    parents = torch.full((len(x), case.nodes), -1, dtype=torch.int32)
    for b, sequences in enumerate(x.tolist()):
        number: dict[tuple[int, ...], int] = {(): 0}
        for sequence in sequences:
            for i in range(len(sequence)):
                prefix = tuple(sequence[: i + 1])
                if prefix not in number and len(number) < case.nodes:
                    number[prefix] = len(number)
                if prefix not in number:
                    break
        for prefix, n in list(number.items())[1:]:
            ids[b, n], parents[b, n] = prefix[-1], number[prefix[:-1]]
    return ids.to(x.device), parents.to(x.device)


def rivals(case: TreeCase, made: Sequence[Tensor]) -> dict[str, Run]:
    """One."""
    return {"Python dictionaries": partial(trie, case)}
