"""compact_cache beside what loops and engines do today."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from specdec_kernels import compact_cache

from . import caches
from .caches import NODES, PAGE, CacheCase, CacheInput
from .suite import CHECKED_REQUESTS, Contender, pytest_speed, rivals_for, same_check

Run = Callable[[CacheInput], list[Tensor] | None]  # moves rows in place, or returns other tensors


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


def crop_and_cat(rival: ModuleType) -> Run:
    """transformers' cache, one request."""

    def run(x: CacheInput) -> list[Tensor]:
        rows = torch.tensor([0, *x.paths[0]], device=x.path.device) + x.starts[0]
        made: list[Tensor] = rival.compact_cache(x.tensors, x.starts[0], NODES, rows)
        return made

    return run


def move_slots(rival: ModuleType, made: Sequence[CacheInput]) -> Run:
    """SGLang's mover; addresses and slot numbers made before the clock."""

    def prepare(x: CacheInput) -> object:
        return rival.prepare(x.tensors, *(page * PAGE + slot for page, slot in (x.source, x.target)))

    ready = {x.layout: prepare(x) for x in made}
    return lambda x: rival.compact_cache(ready.get(x.layout) or prepare(x))


def minimum(case: CacheCase, x: CacheInput, result: None) -> int:
    """Bytes of the rows that change their place, read and written."""
    moving = sum(node != d for nodes in x.paths for d, node in enumerate(nodes, 1))
    return 2 * moving * sum(t.shape[2] * t.shape[3] for t in x.layout.tensors)


def check(case: CacheCase, run: Run) -> Callable[[CacheInput], None]:
    """The same bits as the reference leaves, for some requests; of tensors made anew, in the rows that they have."""

    def compare(_: CacheInput) -> None:
        x = caches.cache_input(replace(case, batch=min(case.batch, CHECKED_REQUESTS)))
        want, got = x.clone(), x.clone()
        ours(want, "reference")
        made = run(got)
        for i, (have, expected) in enumerate(zip(made or got.tensors, want.tensors, strict=True)):
            kept = expected[:, :, : x.starts[0] + 1 + len(x.paths[0])] if made else expected
            assert torch.equal(have, kept), f"tensor {i} differs"

    return compare


def contenders(case: CacheCase, made: Sequence[CacheInput], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rivals."""
    rivals: dict[str, Run] = {"gather/scatter a layer": gather_scatter}
    if case.format in ("bhld", "blhd"):
        rivals["loop over requests"] = loop
    for rival in rivals_for(case, "compact_cache"):
        rivals[rival.NAME] = move_slots(rival, made) if hasattr(rival, "prepare") else crop_and_cat(rival)
    return same_check(ours, backends, rivals, partial(check, case))


test_speed = pytest_speed("compact_cache")
