"""Yin et al.'s simulations: figures of batch decoding and over-acceptance, run by the kernels beside the theorems."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ..lossless import figures
from ..lossless.family import run_all
from ..lossless.goodness import holm
from ..lossless.rejections import Simulation, scaling, simulations
from ..lossless.tradeoff import Point, example, front

ALPHA = 1e-4  # of all observations together: one that far from its theorem is no accident


def run(args: argparse.Namespace) -> int:
    """Exit status 1 where an observation contradicts its theorem."""
    jobs: list[Any] = [*simulations(args.texts), *front(example(), args.draws)]
    found = [finding for finding, _ in run_all(jobs, args.workers, lambda *_: None)]
    seen = sorted((one for one in found if isinstance(one, Simulation)), key=lambda one: one.drafts)
    points = [one for one in found if isinstance(one, Point)]
    curve = scaling()
    for s in seen:
        print(f"M = {s.drafts}: {s.mean:.3f} ± {s.spread:.3f} rejections of 50 tokens, ", end="")
        print(f"theory {s.theory:.3f}, p {s.p_value:.2g}")
    print(f"M -> infinity: {curve['limit'][0]:.3f}")
    figures.simulations(seen, curve, args.folder / "rejections.png")
    figures.front(points, args.folder / "pareto.png")
    print(f"rejections.png and pareto.png in {args.folder}")
    if args.json:
        numbers = {"simulations": [asdict(s) for s in seen], "scaling": curve,
                   "front": [asdict(point) for point in points]}  # fmt: skip
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    p_values = [one.p_value for one in found] + [point.rejected_p for point in points]
    return 0 if min(holm(p_values)) > ALPHA else 1
