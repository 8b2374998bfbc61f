"""rollback beside a few lines of PyTorch that compute the same lengths and trim the same table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import RollbackResult, rollback

from .caches import PAGE, CacheCase, CacheInput, cache_input
from .minimum import moved
from .suite import Run

QUICK = 1
CASES = [CacheCase("rollback", 32, batch, "nhd") for batch in (16, 1, 64)]  # a table is all that a rollback touches


def inputs(case: CacheCase) -> list[CacheInput]:
    """One cache of one layer: pages are freed for all layers at once."""
    x = cache_input(CacheCase(case.op, 32, case.batch, case.format))
    return [x._replace(tensors=x.tensors[:1])]


def ours(case: CacheCase, x: CacheInput, backend: str) -> RollbackResult:
    """One call of the package."""
    return rollback(x.layout, x.lengths, x.num_accepted, backend=backend)


def lengths_and_freed(result: RollbackResult | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """New lengths and freed pages; ours come in a list as long as the table."""
    if isinstance(result, RollbackResult):
        return result.lengths, result.freed_pages[: int(result.num_freed)]
    return result


def minimum(case: CacheCase, x: CacheInput, result: RollbackResult | tuple[Tensor, Tensor]) -> int:
    """Bytes of what is given, of the lengths, of a list as long as the table, and of the table's freed entries."""
    table = x.layout.block_table
    assert table is not None
    lengths, freed = lengths_and_freed(result)
    return moved(x.lengths, x.num_accepted, table, lengths, table, freed)


def plain(x: CacheInput) -> tuple[Tensor, Tensor]:
    """The same in PyTorch, with the synchronisation that a boolean mask needs."""
    table = x.layout.block_table
    assert table is not None
    lengths = x.lengths + 1 + x.num_accepted
    start = torch.arange(table.shape[1], device=table.device) * PAGE
    dropped = (start >= lengths[:, None]) & (table >= 0)
    freed = table[dropped]
    table[dropped] = -1
    return lengths, freed


def check(case: CacheCase, run: Run, x: CacheInput) -> None:
    """Lengths, pages and table of the reference."""
    want, got = x.clone(), x.clone()
    pairs = zip(lengths_and_freed(ours(case, want, "reference")), lengths_and_freed(run(got)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(want.layout.block_table, got.layout.block_table)


def rivals(case: CacheCase, made: Sequence[CacheInput]) -> dict[str, Run]:
    """One."""
    return {"plain PyTorch": plain}
