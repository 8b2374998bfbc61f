"""Draft rows of candidates beside dense ones: `python -m bench.sparse`.

The drafts are drawn from the 64 likeliest ids. Dense rows hold -inf for every other id, so both calls decide the same;
whole rows are those of the model. Calls alternate; printed are medians (on a CPU of one thread's own time), and the
memory of the draft rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from specdec_kernels import RngKey, Sampling, SparseRows, verify_chain, verify_tree

from .cases import DEVICE
from .rows import DTYPES, chain

KEPT, CALLS = 64, 41
TREE = (-1, 0, 0, 1, 1, 2, 3, 3)  # parents


def drawn(rows: Tensor, count: int) -> tuple[SparseRows, Tensor]:
    """(the candidates of rows [..., vocab], `count` ids drawn from each without replacement)."""
    logits, ids = rows.topk(KEPT, dim=-1)
    sparse = SparseRows(ids, logits, logits.float().logsumexp(-1))
    picked = torch.multinomial(logits.float().softmax(-1).flatten(0, -2), count).view(*rows.shape[:-1], count)
    return sparse, ids.gather(-1, picked)


def calls(rule: str, dtype: str, batch: int, vocab: int) -> tuple[dict[str, Callable[[], Tensor]], float]:
    """(the call with whole, dense and sparse rows, bytes of sparse rows over those of dense ones)."""
    is_tree = rule in ("recursive", "traversal")
    draft = len(TREE) - 1 if is_tree else 5
    x = chain(batch, draft, vocab, dtype=DTYPES[dtype], shape="llm")
    source = torch.cat([x.draft, x.draft[:, :1]], 1) if is_tree else x.draft
    sparse, ids = drawn(source, 2)
    dense = sparse.dense(vocab)
    sampling, rng = Sampling(), RngKey(x.rng.seed, x.rng.position, torch.zeros_like(x.rng.seed))
    named = {"sampling": sampling, "draft_sampling": sampling, "rng": rng, "rule": rule}
    if is_tree:
        parents = torch.tensor(TREE, device=DEVICE).expand(batch, -1).contiguous()
        rank = torch.tensor([TREE[:n].count(p) for n, p in enumerate(TREE)], device=DEVICE)
        tokens = ids[:, torch.tensor(TREE).clamp(min=0), rank].contiguous()
        call = lambda rows: verify_tree(tokens, parents, x.target, rows, max_depth=3, **named)  # noqa: E731
    else:
        tokens = ids[..., 0].contiguous()
        call = lambda rows: verify_chain(tokens, x.target, rows, **named)  # noqa: E731
    size = sum(part.numel() * part.element_size() for part in sparse) / (dense.numel() * dense.element_size())
    by_name = {"whole": source, "dense": dense, "sparse": sparse}
    return {name: lambda rows=rows: call(rows).token_ids for name, rows in by_name.items()}, size


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.sparse")
    parser.add_argument("--batch", type=int, default=16, help="requests")
    parser.add_argument("--vocab", type=int, default=128256, help="ids")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = time.perf_counter if DEVICE == "cuda" else time.thread_time
    print("| rule, rows | whole, ms | dense | sparse | sparse / dense | memory of draft rows |")
    print("|---|--:|--:|--:|--:|--:|")
    for rule in ("ratio", "block", "recursive", "traversal"):
        for dtype in ("fp32", "bf16"):
            both, size = calls(rule, dtype, given.batch, given.vocab)
            assert torch.equal(both["dense"](), both["sparse"]())
            times: dict[str, list[float]] = {name: [] for name in both}
            for _ in range(CALLS):
                for name, call in both.items():
                    begin = clock()
                    call()
                    if DEVICE == "cuda":
                        torch.cuda.synchronize()
                    times[name].append(1000 * (clock() - begin))
            whole, dense, sparse = (statistics.median(times[name]) for name in both)
            print(
                f"| {rule}, {dtype} | {whole:.2f} | {dense:.2f} | {sparse:.2f} | {sparse / dense:.2f} | {size:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
