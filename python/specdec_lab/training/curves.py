"""A picture of the loss curves of a run: `python -m specdec_lab.training.curves`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def draw(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """One panel a model: training and held-out measure over processor minutes."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(3.2 * len(curves), 2.8), squeeze=False)
    for axis, (name, curve) in zip(axes[0], curves.items(), strict=True):
        minutes = [s / 60 for s in curve["seconds"]]
        axis.plot(minutes, curve["train"], label="training", linewidth=1)
        axis.plot(minutes, curve["held_out"], label="held out", linewidth=1)
        axis.set(title=name, xlabel="processor minutes", ylabel=curve.get("measure", "loss"))
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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
