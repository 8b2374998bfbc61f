"""Small calls of every op on the GPU, against the reference: what compute-sanitizer watches. Seconds without it."""

from __future__ import annotations

import sys

import torch

import specdec_kernels

from . import suite
from .cases import BOTH, FILTERS, Case
from .rows import DTYPES, chain

VOCAB = 9001  # three tiles of 4096, the last short, rows not 16-byte aligned
RULES = ("ratio", "greedy", "match", "block", "typical", "topm", "distance")


def main() -> int:
    """Number of differences."""
    wrong = 0
    reasons = specdec_kernels.available_backends("cuda")
    backends = [b for b in ("cuda", "triton") if reasons[b] is None]
    print(f"small cases on {', '.join(backends) or 'nothing'}; { ({b: r for b, r in reasons.items() if r}) }")
    for dtype in ("fp32", "bf16"):
        for filters in ("none", BOTH):
            chains = chain(3, 3, VOCAB, dtype=DTYPES[dtype], filters=FILTERS[filters]).to("cuda")
            chains = chains._replace(rng=chains.rng._replace(step=torch.zeros_like(chains.rng.seed)))
            pairs = chains._replace(target=chains.target[:, 0].contiguous(), draft=chains.draft[:, 0].contiguous())
            same = {"dtype": dtype, "filters": filters}
            cases = [(Case("verify_chain", rule=rule, **same), chains) for rule in RULES]
            cases += [(Case(op, **same), pairs) for op in ("sample", "residual_sample", "residual_probs")]
            for case, x in [*cases, (Case("acceptance_ratios", **same), chains)]:
                for name, run in [named for b in backends for named in suite.variants(case, b).items()]:
                    try:
                        suite.module(case.op).check(case, run, x)
                    except AssertionError as fault:
                        wrong += 1
                        print(f"{name} {case.op} {case.rule}, {dtype}, {filters}: {fault}")
    torch.cuda.synchronize()
    print(f"{wrong} differences")
    return wrong if backends else 1


if __name__ == "__main__":
    sys.exit(min(main(), 1))
