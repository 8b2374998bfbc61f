"""select_tree beside EAGLE-2's rerank in PyTorch: top-k of flat scores, sort, and a search for every parent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import CandidateTree, select_tree

from .cases import DEVICE
from .minimum import moved
from .suite import Run
from .trees import TreeCase, shape_cases

WIDTH, LEVELS = 10, 6  # of each level the 10 best have 10 children each, as EAGLE-2 expands
QUICK = 1
CASES = [case for case in shape_cases("select_tree") if case.nodes <= WIDTH * WIDTH]  # a tree has fewer nodes


class ScoredInput(NamedTuple):
    """Candidates of a batch, level by level."""

    token_ids: Tensor  # int64 [batch, candidates]
    parents: Tensor  # int32
    scores: Tensor  # float32, cumulative log-probabilities


def candidates(batch: int, seed: int) -> ScoredInput:
    """One expansion a request."""
    g = torch.Generator().manual_seed(seed)
    count = 1 + WIDTH + WIDTH * WIDTH * (LEVELS - 1)
    parents = torch.full((batch, count), -1, dtype=torch.int32)
    scores = torch.zeros(batch, count)
    for b in range(batch):
        beam, first = torch.zeros(1, dtype=torch.int64), 1
        for _ in range(LEVELS):
            logprob = torch.randn(len(beam), 1000, generator=g).mul(3).log_softmax(-1).topk(WIDTH).values
            score = (scores[b, beam, None] + logprob).flatten()
            nodes = torch.arange(first, first + len(score))
            parents[b, nodes], scores[b, nodes] = beam.repeat_interleave(WIDTH).int(), score
            beam, first = nodes[score.topk(WIDTH).indices.sort().values], first + len(score)
    ids = torch.randint(0, 32000, (batch, count), generator=g)
    return ScoredInput(ids.to(DEVICE), parents.to(DEVICE), scores.to(DEVICE))


def inputs(case: TreeCase) -> list[ScoredInput]:
    """Two batches."""
    return [candidates(case.batch, seed) for seed in range(2)]


def ours(case: TreeCase, x: ScoredInput, backend: str) -> CandidateTree:
    """One call of the package."""
    return select_tree(x.token_ids, x.parents, x.scores, num_nodes=case.nodes, backend=backend)


def minimum(case: TreeCase, x: ScoredInput, result: CandidateTree) -> int:
    """Bytes of the candidates and of the tree."""
    return moved(*x, *result)


def rerank(case: TreeCase, x: ScoredInput) -> tuple[Tensor, Tensor]:
    """(token ids, parents), a request at a time as EAGLE-2 does it; ours take scores without ties."""
    ids, parents = [], []
    for token, parent, score in zip(x.token_ids, x.parents, x.scores, strict=True):
        best = score[1:].topk(case.nodes - 1).indices + 1
        keep = torch.cat([best.new_zeros(1), best.sort().values])
        ids.append(token[keep])
        parents.append(torch.cat([keep.new_full((1,), -1), torch.searchsorted(keep, parent[keep[1:]].long())]))
    return torch.stack(ids), torch.stack(parents).int()


def rivals(case: TreeCase, made: Sequence[ScoredInput]) -> dict[str, Run]:
    """One."""
    return {"EAGLE's PyTorch": partial(rerank, case)}
