"""Trees shaped like what drafters hand in: the likeliest paths under a stated hit rate of each rank, over real rows.

The candidate of rank r at a node is assumed right with probability HIT / (r + 1)^1.7; a tree holds the `nodes - 1`
paths whose product is largest, as Medusa and Sequoia choose theirs (64 nodes: depths 1 to 8). With `varied` each
request has its own rates, and so its own tree, as with EAGLE-2. Rows and drafts come from rows.py: the target's row and
the draft's disagree as there. Candidates are the draft row's best ids, or drawn from it without replacement for rules
that need that. Temperature 1.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import RngKey, Sampling

from .cases import DEVICE, MODELS, OpCase
from .rows import DTYPES, rows

HIT = 0.6
MAX_DEPTH = 8
DRAWN = ("recursive", "traversal")  # rules whose candidates are drawn from the draft distribution


@dataclass(frozen=True)
class TreeCase(OpCase):
    """One shape of one op on trees."""

    nodes: int = 64
    batch: int = 8
    dtype: str = "fp32"
    rule: str = "match"
    vocab: int = 128256

    @property
    def words(self) -> str:
        """Sizes; of a verification the model, dtype and rule too."""
        size = f"{self.nodes} nodes, batch {self.batch}"
        if self.op != "verify_tree":
            return size
        return f"{MODELS[self.vocab]} {self.vocab}, {size}, {self.dtype}, {self.rule}"


class Shape(NamedTuple):
    """Trees without ids."""

    parents: Tensor  # int32 [batch, nodes]
    choices: list[list[tuple[int, ...]]]  # of each request, the paths of ranks in node order: Medusa's form


class TreeInput(NamedTuple):
    """One call of verify_tree."""

    token_ids: Tensor  # int64 [batch, nodes]
    parents: Tensor
    target: Tensor  # [batch, nodes, vocab]
    draft: Tensor | None
    leaf_paths: list[Tensor]  # of each request, int64 [leaves, depth + 1], -1 padded: made before the clock
    sampling: Sampling
    rng: RngKey


def best_paths(nodes: int, hit: float) -> list[tuple[int, ...]]:
    """The nodes - 1 likeliest paths of ranks, by length, then in lexical order."""
    queue: list[tuple[float, tuple[int, ...]]] = [(-hit, (0,))]
    found: list[tuple[int, ...]] = []
    while len(found) < nodes - 1:
        cost, path = heapq.heappop(queue)
        found.append(path)
        rank = path[-1]
        heapq.heappush(queue, (cost * ((rank + 1) / (rank + 2)) ** 1.7, (*path[:-1], rank + 1)))
        if len(path) < MAX_DEPTH:
            heapq.heappush(queue, (cost * hit, (*path, 0)))
    return sorted(found, key=lambda p: (len(p), p))


def shape(nodes: int, batch: int, *, varied: bool, seed: int = 0) -> Shape:
    """Trees of a batch."""
    rng = random.Random(seed)
    choices = [best_paths(nodes, rng.uniform(0.45, 0.75) if varied else HIT) for _ in range(batch)]
    parents = torch.full((batch, nodes), -1, dtype=torch.int32)
    for b, paths in enumerate(choices):
        number = {(): 0, **{path: n for n, path in enumerate(paths, 1)}}
        parents[b, 1:] = torch.tensor([number[path[:-1]] for path in paths])
    return Shape(parents, choices)


def loads(case: TreeCase) -> int:
    """Bytes of the parents, of which every block of 32 nodes loads all."""
    return -(-case.nodes // 32) * 4 * case.batch * case.nodes


def leaf_paths(parents: Tensor) -> Tensor:
    """Nodes from the root to each leaf of one tree, [leaves, depth + 1], -1 padded."""
    parent = parents.tolist()
    paths = []
    for leaf in sorted(set(range(len(parent))) - set(parent), reverse=True):
        path = [leaf]
        while path[-1] > 0:
            path.append(parent[path[-1]])
        paths.append(path[::-1])
    width = max(map(len, paths))
    return torch.tensor([path + [-1] * (width - len(path)) for path in paths])


def tree_input(case: TreeCase, seed: int = 0) -> TreeInput:
    """Trees, candidates and rows of one batch."""
    made = shape(case.nodes, case.batch, varied=False, seed=seed)
    target, draft = rows(case.batch * case.nodes, case.vocab, dtype=DTYPES[case.dtype], seed=seed, device=DEVICE)
    target, draft = (x.view(case.batch, case.nodes, case.vocab) for x in (target, draft))
    ids = torch.full((case.batch, case.nodes), -1)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for b in range(case.batch):
        for node in sorted({p for p in made.parents[b].tolist() if p >= 0}):
            children = (made.parents[b] == node).nonzero()[:, 0]
            row = draft[b, node].float()
            if case.rule in DRAWN:
                row = row - torch.empty_like(row).exponential_(generator=generator).log()
            ids[b, children] = row.topk(len(children)).indices.cpu()
    first = torch.arange(case.batch, device=DEVICE) + case.batch * seed
    paths = leaf_paths(made.parents[0]).to(DEVICE)
    return TreeInput(
        ids.to(DEVICE),
        made.parents.to(DEVICE),
        target,
        draft if case.rule in DRAWN else None,
        [paths] * case.batch,
        Sampling.full(case.batch, temperature=1.0, device=DEVICE),
        RngKey(first, first * 17 + 100, torch.zeros_like(first)),
    )


def shape_cases(op: str) -> list[TreeCase]:
    """Cases of the ops that look at shapes alone, the main one first."""
    return [TreeCase(op, 64, 64), TreeCase(op, 64, 64, threads=1), TreeCase(op, 64, 1), TreeCase(op, 16, 64),
            TreeCase(op, 256, 8)]  # fmt: skip


def varied_shapes(case: TreeCase) -> list[Shape]:
    """Two batches of trees, each request with its own."""
    made = [shape(case.nodes, case.batch, varied=True, seed=seed) for seed in range(2)]
    return [x._replace(parents=x.parents.to(DEVICE)) for x in made]


def medusa_buffers(choices: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """(bool mask [nodes, nodes], depths, leaf paths) of one tree as programs with Medusa heads make them: in Python."""
    ordered = sorted(choices, key=lambda path: (len(path), path))
    number = {(): 0, **{path: n for n, path in enumerate(ordered, 1)}}
    nodes = len(number)
    mask = torch.eye(nodes, dtype=torch.bool)
    mask[:, 0] = True
    depth = torch.zeros(nodes, dtype=torch.int64)
    inner = set()
    for path, n in number.items():
        depth[n] = len(path)
        before = [number[path[:d]] for d in range(1, len(path))]
        mask[n, before] = True
        inner.update([0, *before])
    paths = [[number[path[:d]] for d in range(len(path) + 1)] for path in ordered if number[path] not in inner]
    width = max(map(len, paths))
    return mask, depth, torch.tensor([p + [-1] * (width - len(p)) for p in reversed(paths)])
