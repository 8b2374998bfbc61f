"""python -m tools.simulate [--all] [--backend triton] [--op sample] [--timing]: the kernels' PTX in a simulated GPU.

Without options, one small case a backend. --all runs every case, --timing counts cycles at 128256 ids; both write
bench/results/simulated.json as they go, and docs/simulator.md from it. GPUSIM_LIB names the simulator's library.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: what runs is what its compiler makes
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build/simulate/triton"))

from specdec_kernels._op import OPS  # noqa: E402

from ..gpu_model import cuda  # noqa: E402
from . import page, results, timing  # noqa: E402
from .cases import CASES, QUICK  # noqa: E402
from .functional import run_cases  # noqa: E402
from .gpgpusim import absence  # noqa: E402

BACKENDS = ("triton", "cuda")
PAGE = ROOT / "docs/simulator.md"


def main() -> int:
    """Exits with 1 if a kernel did what no GPU allows or a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every case")
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--timing", action="store_true", help="cycles, in place of results")
    parser.add_argument("--page", action="store_true", help="write the page from the results; run nothing")
    parser.add_argument("--op", help="only cases whose op and name contain this", default="")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page.text(results.load()))
        return 0
    if reason := absence():
        print(f"simulate: skipped, {reason}")
        return 0
    good = timing.run_all(options.op) if options.timing else run_functional(options)
    if options.all or options.timing:
        PAGE.write_text(page.text(results.load()))
    return 0 if good else 1


def run_functional(options: argparse.Namespace) -> bool:
    """The chosen cases on each backend; whether all results were right."""
    good = True
    for backend in options.backend or BACKENDS:
        if backend == "cuda" and cuda.nvcc() is None:
            print("cuda: skipped, no nvcc")
            continue
        is_all = options.all or options.op
        chosen = [
            c
            for c in CASES
            if backend in OPS[c.op].backends
            and options.op in f"{c.op} {c.name}"
            and (is_all or (c.op, c.name) == QUICK[backend])
        ]
        good &= run_cases(chosen, backend, is_noted=options.all)
    return good


if __name__ == "__main__":
    sys.exit(main())
