"""Rows as a table, as JSON with the machine they come from, and as a chart."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

import specdec_kernels

from .errors import UserError
from .measure import RIVALS, Row

COLUMNS = ("", "tokens/s", "speed-up", "per step", "accepted", "predicted", "ratio", "rest", "4-grams", "text")
LEGEND = (
    "per step: tokens; predicted: tokens/s by theory from the acceptance and times of the same run, ratio: measured "
    "to predicted; rest: share of a step outside all forwards; 4-grams: share of different ones; text: how many are "
    "plain decoding's; distribution: their distribution is the same"
)
WIDTH = 120  # where there is no terminal, or a narrow one


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "specdec_kernels": specdec_kernels.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """A table for each temperature and batch."""
    for batch, temperature in dict.fromkeys((row.batch, row.temperature) for row in rows):
        kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        table = Table(title=f"{kind}, batch {batch}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        some = [row for row in rows if (row.batch, row.temperature) == (batch, temperature)]
        best = max(row.tokens_per_second for row in some)
        for row in some:
            table.add_row(*cells(row), style="bold" if row.tokens_per_second == best else "")
        console.print(table)
    console.print(LEGEND, style="dim", highlight=False)


def new_console() -> Console:
    """Wide enough for the tables."""
    console = Console()
    console.width = max(console.width, WIDTH)
    return console


def cells(row: Row) -> list[str]:
    """Of a row, as text."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    predicted = row.predicted_tokens_per_second
    same = "" if row.method in (*RIVALS, "plain") else row.same_text or "distribution"
    return [
        row.method,
        number(row.tokens_per_second, ".1f"),
        number(row.speedup, ".2f"),
        number(row.tokens_per_step, ".2f"),
        number(row.acceptance, ".2f"),
        number(predicted, ".1f"),
        number(row.tokens_per_second / predicted if predicted else None, ".2f"),
        number(row.rest, ".1%"),
        number(row.distinct, ".2f"),
        same,
    ]


def write_json(rows: Sequence[Row], settings: dict[str, Any], path: Path) -> None:
    """All of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"machine": machine(), "settings": settings, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(whole, indent=1) + "\n")


def write_chart(rows: Sequence[Row], path: Path, where: str | None = None) -> None:
    """Speed of each method relative to plain decoding: a panel for each batch size, a dot for each temperature."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UserError("a chart needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    is_relative = all(row.speedup is not None for row in rows)  # plain decoding was measured too
    panels: dict[int, dict[str, dict[float, float]]] = {}
    for row in rows:
        value = row.speedup if is_relative and row.speedup is not None else row.tokens_per_second
        panels.setdefault(row.batch, {}).setdefault(row.method, {})[row.temperature] = value
    heights = [len(methods) + 2.5 for methods in panels.values()]
    size = (9, 1 + 0.25 * sum(heights))
    figure, axes = plt.subplots(
        len(panels), 1, figsize=size, height_ratios=heights, squeeze=False, sharex=True, layout="constrained"
    )
    temperatures = sorted({row.temperature for row in rows})
    colours = dict(zip(temperatures, mpl.colormaps["viridis"](_spread(len(temperatures))), strict=True))
    for axis, (batch, methods) in zip(axes[:, 0], panels.items(), strict=True):
        _dots(axis, methods, colours, ".2f" if is_relative else ".0f")
        axis.set_title(f"batch {batch}", loc="left", fontsize=11, fontweight="bold")
        if is_relative:
            axis.axvline(1, color="black", linewidth=1, zorder=0)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes[0, 0].set_xlim(0)
    axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(temperatures), frameon=False, fontsize=10)
    facts = machine()
    where = where or f"{facts['device']}, {facts['threads']} threads"
    what = "Speed relative to plain decoding" if is_relative else "Tokens per second"
    figure.suptitle(f"{what}\n", x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.text(0.01, 1 - 0.4 / size[1], where, va="center", fontsize=9.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _spread(count: int) -> list[float]:
    """Places on a colour map, dark to light."""
    return [0.15 + 0.7 * i / max(count - 1, 1) for i in range(count)]


def _dots(axis: Any, methods: dict[str, dict[float, float]], colours: dict[float, Any], form: str) -> None:
    """A line for each method, fastest on top: dots by temperature, and the largest as a number."""
    names = sorted(methods, key=lambda name: -max(methods[name].values()))
    for y, name in enumerate(names):
        values = methods[name]
        best = max(values.values())
        axis.plot([min(values.values()), best], [y, y], color="#CCCCCC", linewidth=1.5, zorder=1)
        axis.annotate(f"{best:{form}}", (best, y), (8, 0), textcoords="offset points", va="center", fontsize=9)
    for temperature, colour in colours.items():
        points = [(methods[name][temperature], y) for y, name in enumerate(names) if temperature in methods[name]]
        label = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        axis.plot(*zip(*points, strict=True), "o", color=colour, markersize=7, label=label, zorder=2)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="both", labelsize=9.5, labelbottom=True)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
