"""Host time of small calls on a CPU, replayed and by the long way: python -m bench.host_time.

Vocabularies of 64 ids, so that there is next to nothing to compute. Cold: behind a read of 64 MB, as behind a model's
forward; warm: call after call.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from specdec_kernels import (
    CacheLayout,
    RngKey,
    Sampling,
    _replay,
    compact_cache,
    gather_nodes,
    sample,
    select_tree,
    tree_mask,
    verify_chain,
    verify_tree,
)

VOCAB, COLD_BYTES, RUNS = 64, 64 << 20, 60
PARENTS = [[-1, 0, 0, 1, 1, 2]]


def calls() -> dict[str, Callable[[], object]]:
    """One call of an op each, of one request."""
    numbers = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, VOCAB, generator=numbers)

    sampling = Sampling.full(1, temperature=0.7)
    rng = RngKey(torch.tensor([7]), torch.tensor([20]), torch.tensor([3]))
    parents, ids = torch.tensor(PARENTS), torch.randint(0, VOCAB, (1, 6), generator=numbers)
    drafts = ids[:, 1:].contiguous()
    chain, tree, features, scores = rows(1, 6), rows(1, 6), rows(1, 6), rows(1)[:, :6]
    path, accepted, lengths = torch.tensor([[1, 3, -1]]), torch.tensor([2]).int(), torch.tensor([3])
    cache = CacheLayout([torch.zeros(1, 4, 128, 16) for _ in range(16)], "bhld")
    distribution = {"sampling": sampling, "rng": rng}
    return {
        "sample": lambda: sample(chain[:, 0], **distribution, purpose="target"),
        "verify_chain": lambda: verify_chain(drafts, chain, **distribution, rule="match"),
        "verify_tree": lambda: verify_tree(ids, parents, tree, max_depth=2, **distribution, rule="match"),
        "select_tree": lambda: select_tree(ids, parents, scores, num_nodes=4),
        "tree_mask": lambda: tree_mask(parents, past=lengths, size=64, format="additive"),
        "compact_cache, 16 tensors": lambda: compact_cache(cache, path, accepted, lengths),
        "gather_nodes": lambda: gather_nodes(features, path),
    }


@contextlib.contextmanager
def long_way() -> Iterator[None]:
    """Every call is checked by Python and dispatched by torch."""
    before, _replay._library = _replay.library(), False
    try:
        yield
    finally:
        _replay._library = before


def microseconds(call: Callable[[], object], *, cold: torch.Tensor | None) -> float:
    """Of one call."""
    if cold is not None:
        cold.sum()
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1000


@torch.inference_mode()
def main() -> None:
    """Print a table."""
    if not _replay.library():
        raise SystemExit("bench.host_time: nothing is replayed here, see docs/design.md, Replay")
    other = torch.zeros(COLD_BYTES // 4)
    print("| us a call | warm | long way | cold | long way |\n|---|--:|--:|--:|--:|")
    for name, call in calls().items():
        call()
        times: dict[tuple[bool, bool], list[float]] = {(c, w): [] for c in (False, True) for w in (False, True)}
        for _ in range(RUNS):
            for is_cold in (False, True):
                for is_long in (False, True):
                    with long_way() if is_long else contextlib.nullcontext():
                        call()  # warm: the second call in a row
                        times[is_cold, is_long].append(microseconds(call, cold=other if is_cold else None))
        cells = [f"{statistics.median(values):.1f}" for values in times.values()]
        print(f"| `{name}` | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
