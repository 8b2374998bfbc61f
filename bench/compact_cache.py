"""compact_cache beside what loops do today: copies by request and layer, and a gather and scatter a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec_kernels import compact_cache

from . import caches
from .caches import CacheCase, CacheInput
from .suite import Contender, pytest_speed


def cases(extent: str) -> list[CacheCase]:
    """Cases of `quick`, `default` or `full`."""
    return caches.cases("compact_cache", extent)


def inputs(case: CacheCase) -> list[CacheInput]:
    """Two caches that take turns where memory allows, so that no row stays in a private cache."""
    return [caches.cache_input(case, seed) for seed in range(1 if case.layers * case.batch > 320 else 2)]


def ours(x: CacheInput, backend: str) -> None:
    """One call of the package."""
    compact_cache(x.layout, x.path, x.num_accepted, x.lengths, backend=backend)


def loop(x: CacheInput) -> None:
    """index_select and index_copy for each request and layer."""
    for rows in x.tensors:
        for b, nodes in enumerate(x.paths):
            if nodes:
                source = torch.tensor(nodes, device=rows.device) + x.starts[b]
                target = torch.arange(1, len(nodes) + 1, device=rows.device) + x.starts[b]
                axis = 1 if x.layout.format == "bhld" else 0
                rows[b].index_copy_(axis, target, rows[b].index_select(axis, source))


def gather_scatter(x: CacheInput) -> None:
    """One gather and one scatter a layer, for the whole batch; indices made before the clock."""
    (outer, source), (outer_to, target) = x.source, x.target
    for rows in x.tensors:
        if x.layout.format in ("bhld", "hnd"):
            rows[outer_to, :, target] = rows[outer, :, source]
        else:
            rows[outer_to, target] = rows[outer, source]


def check(run: Callable[[CacheInput], None]) -> Callable[[CacheInput], None]:
    """The same bits as the reference leaves."""

    def compare(x: CacheInput) -> None:
        want, got = x.clone(), x.clone()
        ours(want, "reference")
        run(got)
        for i, (have, expected) in enumerate(zip(got.tensors, want.tensors, strict=True)):
            assert torch.equal(have, expected), f"tensor {i} differs"

    return compare


def contenders(case: CacheCase, made: Sequence[CacheInput], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rivals."""
    field = []
    for backend in backends:
        run = lambda x, backend=backend: ours(x, backend)  # noqa: E731
        field.append(Contender(backend, True, run, check(run)))
    field.append(Contender("gather/scatter a layer", False, gather_scatter, check(gather_scatter)))
    if case.format in ("bhld", "blhd"):
        field.append(Contender("loop over requests", False, loop, check(loop)))
    return field


test_speed = pytest_speed("compact_cache")
