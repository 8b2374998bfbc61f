"""tree_from_sequences beside a trie of Python dictionaries, the usual way of REST and of n-gram drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from specdec_kernels import CandidateTree, tree_from_sequences

from . import trees
from .minimum import moved
from .suite import Contender, pytest_speed, same_check
from .trees import TreeCase

LENGTH = 8


def cases(extent: str) -> list[TreeCase]:
    """Cases of `quick`, `default` or `full`."""
    return trees.cases("tree_from_sequences", extent)


def inputs(case: TreeCase) -> list[Tensor]:
    """Continuations that share prefixes: int64 [batch, sequences, LENGTH]."""
    g = torch.Generator().manual_seed(0)
    size = (case.batch, max(1, (case.nodes - 1) // 4), LENGTH)
    made = [(torch.rand(size, generator=g) ** 4 * 8).long() for _ in range(2)]
    return [x.cuda() for x in made] if torch.cuda.is_available() else made


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


def check(case: TreeCase, run: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor], None]:
    """The tree of the reference."""

    def compare(x: Tensor) -> None:
        got, want = run(x), ours(case, x, "reference")
        assert torch.equal(got[0], want.token_ids) and torch.equal(got[1], want.parents)

    return compare


def contenders(case: TreeCase, made: Sequence[Tensor], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rival."""
    rivals = {"Python dictionaries": partial(trie, case)}
    return same_check(partial(ours, case), backends, rivals, partial(check, case))


test_speed = pytest_speed("tree_from_sequences")
