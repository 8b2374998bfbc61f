"""Small calls of every op on the GPU, against the reference: what compute-sanitizer watches. Seconds without it."""

from __future__ import annotations

import sys

import torch

import specdec_kernels

from . import acceptance_ratios, residual_probs, residual_sample, sample, verify_chain
from .cases import BOTH, FILTERS
from .rows import chain

VOCAB = 9001  # three tiles of 4096, the last short, rows not 16-byte aligned


def main() -> int:
    """Number of differences."""
    wrong = 0
    reasons = specdec_kernels.available_backends("cuda")
    backends = [b for b in ("cuda", "triton") if reasons[b] is None]
    print(f"small cases on {', '.join(backends) or 'nothing'}; { ({b: r for b, r in reasons.items() if r}) }")
    for dtype in (torch.float32, torch.bfloat16):
        for filters in ("none", BOTH):
            x = chain(3, 3, VOCAB, dtype=dtype, filters=FILTERS[filters]).to("cuda")
            x = x._replace(rng=x.rng._replace(step=torch.zeros_like(x.rng.seed)))
            pair = x._replace(target=x.target[:, 0].contiguous(), draft=x.draft[:, 0].contiguous())
            for backend in backends:
                checks = [(f"verify_chain {r}", verify_chain.check_ours(r, backend, False), x) for r in RULES]
                checks += [
                    ("verify_chain + draft_stats", verify_chain.check_ours("ratio", backend, True), x),
                    ("sample", sample.check_ours(backend), pair),
                    ("residual_sample", residual_sample.check_ours(backend), pair),
                    ("residual_probs", residual_probs.check(lambda y, b=backend: residual_probs.ours(y, b)), pair),
                    (
                        "acceptance_ratios",
                        acceptance_ratios.check(lambda y, b=backend: acceptance_ratios.ours(y, b)),
                        x,
                    ),
                ]
                for name, check, given in checks:
                    try:
                        check(given)
                    except AssertionError as fault:
                        wrong += 1
                        print(f"{backend} {name}, {dtype}, {filters}: {fault}")
    torch.cuda.synchronize()
    print(f"{wrong} differences")
    return wrong if backends else 1


RULES = ("ratio", "greedy", "match", "block", "typical", "topm", "distance")

if __name__ == "__main__":
    sys.exit(min(main(), 1))
