"""What log-probabilities and the 20 likeliest ids of each emitted token add to `verify_chain`.

`python -m bench.listed` prints the least CPU time of one thread: of `verify_chain` alone, of it and then
`token_logprobs` on the rows that emitted, and of it with `top`, raw and processed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from specdec_kernels import Sampling, token_logprobs, verify_chain

from .rows import DTYPES, Filters, chain

BATCH, DRAFT, VOCAB, TOP, CALLS = 16, 5, 128256, 20, 30
FILTERS = {"top-k 50, top-p .95": Filters(0.8, top_k=50, top_p=0.95), "temperature .8": Filters(0.8)}


def main() -> None:
    """Print the table, one thread."""
    torch.set_num_threads(1)
    print("| rows | rule | sampling | alone, ms | then `token_logprobs` | raw, `top=20` | processed, `top=20` |")
    print("|---|---|---|--:|--:|--:|--:|")
    for dtype in ("fp32", "bf16"):
        for rule in ("ratio", "match", "greedy"):
            for name, filters in FILTERS.items():
                if rule != "greedy" or filters.top_k is None:
                    _measure(dtype, rule, "none" if rule == "greedy" else name, filters)


def _measure(dtype: str, rule: str, name: str, filters: Filters) -> None:
    x = chain(BATCH, DRAFT, VOCAB, dtype=DTYPES[dtype], filters=filters, shape="llm")
    has_draft = rule == "ratio"
    args = (x.draft_ids, x.target, x.draft if has_draft else None)
    named = {"sampling": x.sampling, "draft_sampling": x.sampling if has_draft else None, "rng": x.rng, "rule": rule}
    rows, tokens = x.target.flatten(0, 1), verify_chain(*args, **named).token_ids.flatten()
    emitting = Sampling(active=tokens >= 0)
    calls: dict[str, Callable[[], object]] = {
        "alone": lambda: verify_chain(*args, **named),
        "then": lambda: token_logprobs(rows, tokens, top=TOP, sampling=emitting),
        "raw": lambda: verify_chain(*args, **named, logprobs="raw", top=TOP),
        "processed": lambda: verify_chain(*args, **named, logprobs="processed", top=TOP),
    }
    times: dict[str, list[float]] = {call: [] for call in calls}
    for _ in range(CALLS):
        for call, run in calls.items():
            begin = time.thread_time()
            run()
            times[call].append(1000 * (time.thread_time() - begin))
    p = {call: min(values) for call, values in times.items()}
    p["then"] += p["alone"]
    ratios = " | ".join(f"{p[call] / p['alone']:.2f}" for call in ("then", "raw", "processed"))
    print(f"| {dtype} | `{rule}` | {name} | {p['alone']:.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
