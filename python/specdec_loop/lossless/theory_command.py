"""The command ``theory figures``: Yin et al.'s simulations, run by `batch_sd` and held beside their theorems."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from . import figures
from .goodness import normal_tail
from .rejections import simulate, toys
from .tradeoff import front

ALPHA = 1e-4  # a simulation that far from its theorem is no accident


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("what", choices=["figures"], help="draw the figures")
    parser.add_argument("--folder", default="docs/theory", help="where the PNGs go")
    parser.add_argument("--texts", type=int, default=4000, help="simulated texts of 50 tokens")
    parser.add_argument("--draws", type=int, default=200_000, help="draws of a point beside the front")
    parser.add_argument("--json", help="write the numbers here")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 where an observation contradicts its theorem."""
    folder = Path(args.folder)
    found, scaling = simulate(texts=args.texts)
    figures.simulations(found, scaling, folder / "rejections.png")
    agrees = True
    for s in found:
        p = normal_tail((s.mean - s.theory) / s.spread)
        agrees &= p > ALPHA
        print(
            f"M = {s.drafts}: {s.mean:.3f} ± {s.spread:.3f} rejections of 50 tokens, theory {s.theory:.3f}, p {p:.2g}"
        )
    print(f"M -> infinity: {scaling['limit'][0]:.3f}")
    panels = toys(args.draws // 10)
    figures.improvements(panels, folder / "batch_improvement.png")
    rows = {"p (.2 .3 .1 .4), q (.5 .3 .15 .05)": ([0.2, 0.3, 0.1, 0.4], [0.5, 0.3, 0.15, 0.05])}
    laws = {name: (torch.tensor(p).log(), torch.tensor(q).log()) for name, (p, q) in rows.items()}
    points = front(laws, args.draws)
    figures.front(points, folder / "pareto.png")
    agrees &= min(point.p_value for point in points) > ALPHA
    if args.json:
        numbers = {"simulations": [s.row() for s in found], "scaling": scaling, "improvements": panels,
                   "front": [point.row() for point in points]}  # fmt: skip
        Path(args.json).write_text(json.dumps(numbers, indent=1) + "\n")
    return 0 if agrees else 1


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m specdec_loop.lossless.theory_command", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
