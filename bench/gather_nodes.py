"""gather_nodes beside torch.gather: hidden states of 4096 of the accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import gather_nodes

from .caches import MAX_DEPTH, NODES, CacheCase, cache_input
from .minimum import moved
from .suite import Run

QUICK, HIDDEN = 1, 4096
CASES = [CacheCase("gather_nodes", 32, batch, "blhd") for batch in (16, 1)]


class NodeInput(NamedTuple):
    """Features of every node and the accepted paths."""

    values: Tensor  # [batch, NODES, HIDDEN]
    path: Tensor


def inputs(case: CacheCase) -> list[NodeInput]:
    """The paths of the other cache benchmarks."""
    path = cache_input(case).path
    return [NodeInput(torch.randn(case.batch, NODES, HIDDEN, device=path.device).bfloat16(), path)]


def ours(case: CacheCase, x: NodeInput, backend: str) -> Tensor:
    """One call of the package."""
    return gather_nodes(x.values, x.path, backend=backend).values


def minimum(case: CacheCase, x: NodeInput, result: Tensor) -> int:
    """Bytes of the paths, of the root's row and those on the path, and of the result."""
    rows = len(x.path) + int((x.path >= 0).sum())
    return moved(x.path, result) + rows * moved(result[0, 0])


def gathered(x: NodeInput) -> Tensor:
    """The same in PyTorch."""
    node = torch.nn.functional.pad(x.path[:, :MAX_DEPTH], (1, 0))
    rows = x.values.gather(1, node.clamp(min=0)[..., None].expand(-1, -1, HIDDEN))
    return rows * (node >= 0)[..., None]


def rivals(case: CacheCase, made: Sequence[NodeInput]) -> dict[str, Run]:
    """One."""
    return {"torch.gather": gathered}
