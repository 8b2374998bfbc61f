"""Host time of small calls on a CPU: python -m bench.host_time.

Vocabularies of 64 ids and one thread, so that there is next to nothing to compute. Warm: call after call; cold: after a
read of 64 MB, as after a model's forward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import specdec_kernels as ops
from specdec_kernels import CacheLayout, RngKey, Sampling

VOCAB, COLD_BYTES, RUNS = 64, 64 << 20, 60
PARENTS = [[-1, 0, 0, 1, 1, 2]]
Calls = dict[str, Callable[[], object]]


def rows(*shape: int) -> torch.Tensor:
    """Logits of VOCAB ids."""
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(len(shape)))


def chain_calls() -> Calls:
    """One call of each op on rows and chains, of one request."""
    sampling, filtered = Sampling.full(1, temperature=0.7), Sampling.full(1, temperature=0.7, top_k=20, top_p=0.9)
    rng = RngKey(torch.tensor([7]), torch.tensor([20]), torch.tensor([3]))
    request = {"sampling": sampling, "rng": rng}
    drafted = {"sampling": filtered, "draft_sampling": filtered}
    drafts = torch.randint(0, VOCAB, (1, 5), generator=torch.Generator().manual_seed(0))
    row, chain, draft = rows(1), rows(1, 6), rows(1, 5)
    stats = torch.zeros(1, 5), torch.full((1, 5), -30.0)
    weights = {"a": torch.ones(1), "b": torch.ones(1)}
    counts, one = ops.TokenCounts.empty(1, 32), torch.ones(1)
    edits = ops.Edits(repetition=one, frequency=one, presence=one, counts=counts)
    return {
        "sample": lambda: ops.sample(row, **request, purpose="target"),
        "token_logprobs, 20 ids": lambda: ops.token_logprobs(row, drafts[0, :1], top=20),
        "verify_chain, match": lambda: ops.verify_chain(drafts, chain, **request, rule="match"),
        "verify_chain, ratio, all arguments": lambda: ops.verify_chain(
            drafts, chain, draft, **drafted, draft_stats=stats, rng=rng, logprobs="raw"
        ),
        "acceptance_ratios": lambda: ops.acceptance_ratios(drafts, chain, draft, **drafted),
        "allocate_drafts": lambda: ops.allocate_drafts(drafts, stats[0], budget=5),
        "edit_rows": lambda: ops.edit_rows(edits, drafts, vocab=VOCAB),
        "count_tokens": lambda: ops.count_tokens(counts, drafts),
        "residual_probs": lambda: ops.residual_probs(row, row, **drafted, **weights),
        "residual_sample": lambda: ops.residual_sample(row, row, **drafted, **weights, rng=rng),
    }


def tree_calls() -> Calls:
    """One call of each op on trees, of one request."""
    sampling = Sampling.full(1, temperature=0.7)
    rng = RngKey(torch.tensor([7]), torch.tensor([20]), torch.tensor([3]))
    parents, lengths = torch.tensor(PARENTS), torch.tensor([3])
    ids = torch.randint(0, VOCAB, (1, 6), generator=torch.Generator().manual_seed(0))
    tree, scores = rows(1, 6), rows(1)[:, :6]
    request = {"sampling": sampling, "rng": rng}
    sequences, marginals = ids.view(1, 2, 3), -torch.ones(1, 2, 3)
    ancestors = ops.tree_layout(parents).ancestors
    query, key = torch.randn(1, 6, 2, 16), torch.randn(1, 2, 16, 16)
    return {
        "verify_tree": lambda: ops.verify_tree(ids, parents, tree, max_depth=2, **request, rule="match"),
        "tree_layout": lambda: ops.tree_layout(parents, max_depth=2),
        "tree_mask": lambda: ops.tree_mask(parents, past=lengths, size=64, format="additive"),
        "select_tree": lambda: ops.select_tree(ids, parents, scores, num_nodes=4),
        "tree_from_sequences": lambda: ops.tree_from_sequences(sequences),
        "tree_from_marginals": lambda: ops.tree_from_marginals(sequences, marginals, num_nodes=4),
        "tree_attention": lambda: ops.tree_attention(query, key, key, ancestors, lengths),
    }


def cache_calls() -> Calls:
    """One call of each op on caches, of one request."""
    path, accepted, lengths = torch.tensor([[1, 3, -1]]), torch.tensor([2]).int(), torch.tensor([3])
    cache = CacheLayout([torch.zeros(1, 4, 128, 16) for _ in range(16)], "bhld")
    features = rows(1, 6)
    state, keys = torch.zeros(1, 1, 1, 4, 4), torch.ones(1, 1, 4, 1, 4)
    window, inputs = torch.zeros(1, 1, 4, 3), torch.ones(1, 1, 4, 4)
    return {
        "compact_cache, 16 tensors": lambda: ops.compact_cache(cache, path, accepted, lengths),
        "rollback, 16 tensors": lambda: ops.rollback(cache, lengths, accepted),
        "select_state, 16 tensors": lambda: ops.select_state(cache, accepted),
        "gather_nodes": lambda: ops.gather_nodes(features, path),
        "advance_state": lambda: ops.advance_state(state, keys, keys, accepted),
        "advance_window": lambda: ops.advance_window(window, inputs, accepted),
    }


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
    torch.set_num_threads(1)
    other = torch.zeros(COLD_BYTES // 4)
    print("| us a call | warm | cold |\n|---|--:|--:|")
    for name, call in (chain_calls() | tree_calls() | cache_calls()).items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for is_cold in (False, True) * RUNS:
            call()  # warm: the second call in a row
            times[is_cold].append(microseconds(call, cold=other if is_cold else None))
        print(f"| `{name}` | " + " | ".join(f"{statistics.median(t):.1f}" for t in times.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
