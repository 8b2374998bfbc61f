"""Cache ops on a GPU: no synchronisation, replay in a graph, and the hazards of many threads in one row."""

from __future__ import annotations

import random

import pytest
import torch
from caches import assert_bits, compacted, counts, make_cache, padded

from specdec_kernels import compact_cache, rollback

REPEATS = 1000
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the host shim has no races"),
    pytest.mark.parametrize("kernels", ["cuda", "triton"]),
]


@pytest.mark.parametrize("format", ["bhld", "nhd"])
def test_a_graph_replays_on_new_verdicts_without_synchronising(kernels: str, format: str) -> None:
    """One capture serves every path, length and table that its buffers later hold."""
    batch, columns, rng = 8, 6, random.Random(0)
    cache = make_cache(format, batch=batch, capacity=96, heads=(8,) * 8, dims=(128,) * 8, device="cuda")
    layout = cache.layout()
    path, accepted = padded([[]] * batch, columns, device="cuda"), counts([0] * batch, "cuda")
    lengths = torch.zeros(batch, dtype=torch.int64, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        status = compact_cache(layout, path, accepted, lengths, backend=kernels)
        return status, rollback(layout, lengths, accepted, max_tail=0, backend=kernels).lengths

    step()  # compiles, and builds the table of addresses
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        status, new = step()
    for _ in range(20):
        nodes = [sorted(rng.sample(range(1, 20), rng.randrange(columns))) for _ in range(batch)]
        starts = [rng.randrange(70) for _ in range(batch)]
        want = compacted(cache, nodes, starts)
        path.copy_(padded(nodes, columns))
        accepted.copy_(counts([len(n) for n in nodes]))
        lengths.copy_(torch.tensor(starts))
        graph.replay()
        assert status.tolist() == [0] * batch
        assert new.tolist() == [n + 1 + len(p) for n, p in zip(starts, nodes, strict=True)]
        assert_bits(cache, want)


def test_a_thousand_overlapping_moves_leave_the_same_bits(kernels: str) -> None:
    """Every row is a source and a destination; a row written too early would spread."""
    cache = make_cache("blhd", batch=16, capacity=300, heads=(8,), dims=(128,), device="cuda")
    layout, nodes = cache.layout(), list(range(2, 290))
    path, lengths = padded([nodes] * 16, 300, device="cuda"), torch.zeros(16, dtype=torch.int64, device="cuda")
    accepted, before = counts([len(nodes)] * 16, "cuda"), cache.buffers[0].clone()
    want = compacted(cache, [nodes] * 16, [0] * 16)[0].cuda()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        cache.buffers[0].copy_(before)
        compact_cache(layout, path, accepted, lengths, backend=kernels)
        differing += (cache.buffers[0] != want).sum()
    assert int(differing) == 0
