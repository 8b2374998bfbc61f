"""gather_nodes beside torch.gather: hidden states of 4096 of the accepted path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import gather_nodes

from .caches import MAX_DEPTH, NODES, CacheCase, cache_input
from .minimum import moved
from .suite import Contender, pytest_speed, same_check

HIDDEN = 4096


class NodeInput(NamedTuple):
    """Features of every node and the accepted paths."""

    values: Tensor  # [batch, NODES, HIDDEN]
    path: Tensor


def cases(extent: str) -> list[CacheCase]:
    """Cases of `quick`, `default` or `full`."""
    batches = {"quick": (16,), "default": (1, 16)}.get(extent, (1, 4, 16, 64))
    return [CacheCase("gather_nodes", 32, batch, "blhd") for batch in batches]


def inputs(case: CacheCase) -> list[NodeInput]:
    """The paths of the other cache benchmarks."""
    path = cache_input(case).path
    return [NodeInput(torch.randn(case.batch, NODES, HIDDEN, device=path.device).bfloat16(), path)]


def ours(x: NodeInput, backend: str) -> Tensor:
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


def check(run: Callable[[NodeInput], Tensor]) -> Callable[[NodeInput], None]:
    """The rows of the reference."""

    def compare(x: NodeInput) -> None:
        assert torch.equal(run(x), ours(x, "reference"))

    return compare


def contenders(case: CacheCase, made: Sequence[NodeInput], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rival."""
    return same_check(ours, backends, {"torch.gather": gathered}, check)


test_speed = pytest_speed("gather_nodes")
