"""Caches shaped like real models', and the accepted paths of trees in them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import CacheLayout

from .cases import DEVICE, OpCase

NODES, MAX_DEPTH = 26, 5  # of a tree; on average half of the depth is accepted
PAGE = 16
MODELS = {32: "8B", 80: "70B"}  # layers, each with 8 heads of 128, bfloat16


@dataclass(frozen=True)
class CacheCase(OpCase):
    """One shape of one op on a cache."""

    layers: int = 32
    batch: int = 16
    format: str = "bhld"

    @property
    def words(self) -> str:
        """Model, batch, layout."""
        return f"{MODELS[self.layers]}-like {self.layers} layers, batch {self.batch}, {self.format}"


class CacheInput(NamedTuple):
    """A cache and one step's verdict, also as the host lists and index tensors that rivals take."""

    tensors: list[Tensor]  # keys and values of every layer
    layout: CacheLayout
    path: Tensor
    num_accepted: Tensor
    lengths: Tensor
    paths: list[list[int]]
    starts: list[int]
    source: tuple[Tensor, ...]  # (request, slot) or (page, slot) of every row that the path names
    target: tuple[Tensor, ...]

    def clone(self) -> CacheInput:
        """The same in memory of its own, for the check before the clock."""
        tensors = [t.clone() for t in self.tensors]
        table = self.layout.block_table
        table = None if table is None else table.clone()
        return self._replace(tensors=tensors, layout=CacheLayout(tensors, self.layout.format, table))


def cache_input(case: CacheCase, seed: int = 0) -> CacheInput:
    """A cache of random lengths from 100 to its capacity, and one random path a request."""
    rng, heads, dim = random.Random(seed), 8, 128
    length = 512 if case.layers * case.batch <= 2048 else 160  # 5 GiB at most; what moves does not depend on it
    blocks = length // PAGE
    shape = {
        "bhld": (case.batch, heads, length, dim),
        "blhd": (case.batch, length, heads, dim),
        "nhd": (case.batch * blocks, PAGE, heads, dim),
        "hnd": (case.batch * blocks, heads, PAGE, dim),
    }[case.format]
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).uniform_() for _ in range(2 * case.layers)]
    table = None
    if case.format in ("nhd", "hnd"):
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
        table = order.view(case.batch, blocks).int().to(DEVICE)
    paths = [sorted(rng.sample(range(1, NODES), rng.randint(0, MAX_DEPTH))) for _ in range(case.batch)]
    starts = [rng.randrange(100, length - NODES) for _ in paths]
    request = torch.tensor([b for b, nodes in enumerate(paths) for _ in nodes], dtype=torch.int64)
    source = torch.tensor([starts[b] + n for b, nodes in enumerate(paths) for n in nodes], dtype=torch.int64)
    target = torch.tensor([starts[b] + d for b, nodes in enumerate(paths) for d, _ in enumerate(nodes, 1)])
    places = []
    for slot in (source, target.long()):
        place = (request, slot) if table is None else (table.cpu()[request, slot // PAGE].long(), slot % PAGE)
        places.append(tuple(p.to(DEVICE) for p in place))
    padded = [nodes + [-1] * (MAX_DEPTH + 1 - len(nodes)) for nodes in paths]
    accepted = torch.tensor([len(nodes) for nodes in paths], dtype=torch.int32, device=DEVICE)
    return CacheInput(
        tensors, CacheLayout(tensors, case.format, table), torch.tensor(padded, dtype=torch.int32, device=DEVICE),
        accepted, torch.tensor(starts, device=DEVICE), paths, starts, places[0], places[1],
    )  # fmt: skip
