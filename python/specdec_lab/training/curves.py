"""A picture of the loss curves of a run: `python -m specdec_lab.training.curves`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def draw(curves: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel a model: training and held-out measure over processor minutes, the last held-out value as a number."""
    from ..lossless.figures import INK, OUTPUT, TARGET, canvas, save

    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = canvas(rows, columns, 2.6, "Training of each model: blue on training text, orange on held-out text")
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (name, curve) in zip(axes.flat, curves.items(), strict=False):
        minutes = [s / 60 for s in curve["seconds"]]
        axis.plot(minutes, curve["train"], ".-", color=TARGET, linewidth=1.5)
        axis.plot(minutes, curve["held_out"], ".-", color=OUTPUT, linewidth=1.5)
        held_out = curve["held_out"][-1]
        shift = (0, 8) if held_out > curve["train"][-1] else (0, -13)
        axis.annotate(f"{held_out:.2f}", (minutes[-1], held_out), shift, textcoords="offset points", ha="right",
                      fontsize=9.5, color=OUTPUT)  # fmt: skip
        axis.set_title(name, fontsize=10.5, loc="left", color=INK)
        axis.set_xlabel("processor minutes", fontsize=9.5)
        axis.set_ylabel(curve.get("measure", "loss"), fontsize=9.5)
        axis.set_xlim(0, 1.05 * minutes[-1])
        axis.set_ylim(0, 1 if curve.get("measure") == "acceptance" else None)
    save(figure, path)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="specdec_lab.training.curves", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="folder of checkpoints and curves")
    parser.add_argument("--out", type=Path, default=Path("python/models"), help="folder for curves.json and curves.png")
    args = parser.parse_args(arguments)
    found = sorted(args.work.glob("*/curve.json"))
    if not found:
        parser.error(f"{args.work}: no curve.json of any run")
    curves = {path.parent.name: json.loads(path.read_text()) for path in found}
    (args.out / "curves.json").write_text(json.dumps(curves) + "\n")
    draw(curves, args.out / "curves.png")


if __name__ == "__main__":
    main()
