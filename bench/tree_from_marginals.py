"""tree_from_marginals beside a heap on the host, as engines build such trees (vLLM #40809, SGLang #22887)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import CandidateTree, tree_from_marginals

from .cases import DEVICE
from .minimum import moved
from .suite import Run
from .trees import TreeCase, shape_cases

DEPTH, WIDTH = 8, 8  # the 8 best of 8 positions, as block drafters give them
QUICK = 1
CASES = shape_cases("tree_from_marginals")


class MarginalInput(NamedTuple):
    """What a block drafter leaves."""

    candidate_ids: Tensor  # int64 [batch, DEPTH, WIDTH]
    logprobs: Tensor  # float32


def inputs(case: TreeCase) -> list[MarginalInput]:
    """Two batches; later positions are less certain."""
    g = torch.Generator().manual_seed(0)
    made = []
    for _ in range(2):
        rows = torch.randn(case.batch, DEPTH, 1000, generator=g) * torch.linspace(4, 2, DEPTH)[:, None]
        top = rows.log_softmax(-1).topk(WIDTH)
        made.append(MarginalInput(top.indices.to(DEVICE), top.values.to(DEVICE)))
    return made


def ours(case: TreeCase, x: MarginalInput, backend: str) -> CandidateTree:
    """One call of the package."""
    return tree_from_marginals(x.candidate_ids, x.logprobs, num_nodes=case.nodes, backend=backend)


def minimum(case: TreeCase, x: MarginalInput, result: CandidateTree) -> int:
    """Bytes of the candidates and of the tree."""
    return moved(*x, *result)


def heaps(case: TreeCase, x: MarginalInput) -> tuple[Tensor, Tensor]:
    """(token ids, parents): copied to the host, a heap of prefixes a request, copied back."""
    ids, parents = [], []
    for tokens, logprobs in zip(x.candidate_ids.tolist(), x.logprobs.tolist(), strict=True):
        token, parent = [-1], [-1]
        heap = [(-logprobs[0][0], 0, 0, 0)]  # (-score, parent, position, rank)
        while heap and len(token) < case.nodes:
            cost, above, position, rank = heapq.heappop(heap)
            node = len(token)
            token.append(tokens[position][rank])
            parent.append(above)
            if rank + 1 < WIDTH:
                following = cost + logprobs[position][rank] - logprobs[position][rank + 1]
                heapq.heappush(heap, (following, above, position, rank + 1))
            if position + 1 < DEPTH:
                heapq.heappush(heap, (cost - logprobs[position + 1][0], node, position + 1, 0))
        ids.append(token)
        parents.append(parent)
    return torch.tensor(ids, device=DEVICE), torch.tensor(parents, dtype=torch.int32, device=DEVICE)


def rivals(case: TreeCase, made: Sequence[MarginalInput]) -> dict[str, Run]:
    """One."""
    return {"heapq": partial(heaps, case)}
