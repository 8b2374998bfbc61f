"""compact_cache beside what loops and engines do today."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from specdec_kernels import compact_cache

from .caches import NODES, PAGE, CacheCase, CacheInput, cache_input
from .suite import CHECKED_REQUESTS, rivals_for

OP, QUICK = "compact_cache", 3
CASES = [
    CacheCase(OP),
    CacheCase(OP, threads=1),
    CacheCase(OP, format="nhd"),
    CacheCase(OP, batch=1),
    CacheCase(OP, batch=64, format="nhd"),
    *(CacheCase(OP, layers=80, batch=batch) for batch in (1, 4, 64)),
]
Run = Callable[[CacheInput], list[Tensor] | None]  # moves rows in place, or returns other tensors


def inputs(case: CacheCase) -> list[CacheInput]:
    """Two caches that take turns where memory allows, so that no row stays in a private cache."""
    return [cache_input(case, seed) for seed in range(1 if case.layers * case.batch > 320 else 2)]


def ours(case: CacheCase, x: CacheInput, backend: str) -> None:
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


def check(case: CacheCase, run: Run, _: CacheInput) -> None:
    """The same bits as the reference leaves, for some requests; of tensors made anew, in the rows that they have."""
    x = cache_input(replace(case, batch=min(case.batch, CHECKED_REQUESTS)))
    want, got = x.clone(), x.clone()
    ours(case, want, "reference")
    made = run(got)
    for i, (have, expected) in enumerate(zip(made or got.tensors, want.tensors, strict=True)):
        kept = expected[:, :, : x.starts[0] + 1 + len(x.paths[0])] if made else expected
        assert torch.equal(have, kept), f"tensor {i} differs"


def rivals(case: CacheCase, made: Sequence[CacheInput]) -> dict[str, Run]:
    """Loops of PyTorch, and others' functions where they take the layout."""
    found: dict[str, Run] = {"gather/scatter a layer": gather_scatter}
    if case.format in ("bhld", "blhd"):
        found["loop over requests"] = loop
    for rival in rivals_for(case, OP):
        found[rival.NAME] = move_slots(rival, made) if hasattr(rival, "prepare") else crop_and_cat(rival)
    return found
