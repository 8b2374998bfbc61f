"""python -m bench.gpu_small: small calls of every op on the GPU, against the reference on the cpu.

This is what compute-sanitizer watches; without it, seconds. Inputs are made on the cpu and copied, so that hardly a
kernel but ours runs. The calls are those of the tests, over rows of three tiles whose last is short and which are not
16-byte aligned.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels
from specdec_kernels._op import OPS

from .machine import ROOT

sys.path.insert(0, str(ROOT / "tests"))
import cases as chain_cases
import op_calls
import tree_cases
from other_device import tensors

VOCAB = 9001
BATCH = 3


class Call(NamedTuple):
    """One call, its arguments made anew each time: some ops write into them."""

    op: str
    words: str
    make: Callable[[], op_calls.Call]


def chain(**options: Any) -> op_calls.Call:
    """Arguments of verify_chain."""
    case = chain_cases.make_chain(BATCH, 4, VOCAB, **options)
    return (case.draft_ids, case.target_logits, case.draft_logits), case.keywords


def tree(**options: Any) -> op_calls.Call:
    """Arguments of verify_tree."""
    case = tree_cases.make_tree(BATCH, 9, VOCAB, **options)
    return case.tensors, case.keywords


def calls() -> Iterator[Call]:
    """Chains with and without filters, trees, caches and the rest; then the other rules and bfloat16."""
    bf16 = torch.bfloat16
    for filters in ("none", "all", "top_p"):
        yield Call("verify_chain", f"ratio, {filters}", lambda f=filters: chain(filters=f))
    yield Call("verify_chain", "ratio, draft_stats", lambda: chain(drafts="stats"))
    yield Call("verify_tree", "match", lambda: tree(rule="match", drafts="none"))
    yield Call("verify_tree", "recursive, all", lambda: tree(filters="all"))
    for op, make in op_calls.CALLS.items():
        if op not in ("verify_chain", "verify_tree"):
            yield Call(op, "as in the tests", lambda m=make: m(1))
    for rule in chain_cases.RULES[1:]:
        drafts = "model" if rule == "block" else "point"
        yield Call("verify_chain", f"{rule}, bf16", lambda r=rule, d=drafts: chain(rule=r, drafts=d, dtype=bf16))
    for rule in tree_cases.TREE_RULES[1:]:
        drafts = "model" if rule in ("recursive", "traversal") else "none"
        yield Call("verify_tree", f"{rule}, bf16", lambda r=rule, d=drafts: tree(rule=r, drafts=d, dtype=bf16))


def differences(call: Call, backend: str) -> list[str]:
    """What `backend` gives on the GPU and the reference does not; arguments that are written count too."""
    function = getattr(specdec_kernels, call.op)
    (args, options), (there, moved) = call.make(), (op_calls.moved(part, "cuda") for part in call.make())
    want = function(*args, **options, backend="reference")
    got = function(*there, **moved, backend=backend)
    pairs = enumerate(zip(tensors((got, there)), tensors((want, args)), strict=True))
    return [f"tensor {i} is {x.cpu()}, not {y}" for i, (x, y) in pairs if not close(x.cpu(), y)]


def close(x: Tensor, y: Tensor) -> bool:
    """Equal ids; floats within what sums of another order differ by."""
    if not y.is_floating_point():
        return torch.equal(x, y)
    return torch.allclose(x.float(), y.float(), rtol=1e-3, atol=1e-4, equal_nan=True)


def main() -> int:
    """Whether anything differs, or nothing ran."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_small", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1e9, help="no new call after so long")
    chosen = parser.parse_args()
    op_calls.VOCAB = VOCAB
    reasons = specdec_kernels.available_backends("cuda")
    backends = [b for b in ("cuda", "triton") if reasons[b] is None]
    print(f"small calls on {', '.join(backends)}; { ({b: r for b, r in reasons.items() if r}) }")
    jobs = [(call, backend) for call in calls() for backend in backends if backend in OPS[call.op].backends]
    jobs.sort(key=lambda job: backends.index(job[1]))  # cuda first: nothing is compiled for it
    started, done, wrong = time.perf_counter(), 0, 0
    for call, backend in jobs:
        if time.perf_counter() - started > chosen.seconds:
            break
        print(f"{backend} {call.op}, {call.words}", flush=True)
        found = differences(call, backend)
        wrong += len(found)
        done += 1
        print("".join(f"  {fault}\n" for fault in found), end="", flush=True)
    torch.cuda.synchronize()
    print(f"{wrong} differences in {done} calls of {len(jobs)}")
    return int(wrong > 0 or done == 0)


if __name__ == "__main__":
    sys.exit(main())
