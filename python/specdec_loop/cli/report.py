"""Rows as a table, as JSON with the machine they come from, and as a chart."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from .loading import UserError
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
    whole = {"machine": machine(), "settings": settings, "rows": [row.json() for row in rows]}
    path.write_text(json.dumps(whole, indent=1) + "\n")


def write_chart(rows: Sequence[Row], path: Path) -> None:
    """Bars of tokens/s with the prediction as a tick, tokens a step, acceptance by position; a line a batch."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UserError("a chart needs matplotlib: pip install 'specdec_kernels[loop]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    batches = list(dict.fromkeys(row.batch for row in rows))
    figure, axes = plt.subplots(len(batches), 3, figsize=(17, 1 + 4.5 * len(batches)), squeeze=False)
    for line, batch in zip(axes, batches, strict=True):
        some = [row for row in rows if row.batch == batch]
        names = list(dict.fromkeys(row.method for row in some))
        temperatures = list(dict.fromkeys(row.temperature for row in some))
        for i, temperature in enumerate(temperatures):
            own = {row.method: row for row in some if row.temperature == temperature}
            height = 0.8 / len(temperatures)
            label = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            for place, name in enumerate(names):
                if name not in own:
                    continue
                row, y, color = own[name], place + (i - (len(temperatures) - 1) / 2) * height, f"C{i}"
                line[0].barh(y, row.tokens_per_second, height, color=color, label=label if place == 0 else None)
                if row.predicted_tokens_per_second:
                    line[0].plot(row.predicted_tokens_per_second, y, "k|", markersize=9)
                if row.tokens_per_step:
                    line[1].barh(y, row.tokens_per_step, height, color=color)
                if row.acceptance_by_position and i == 0:
                    shares = row.acceptance_by_position
                    style = "-" if place < 10 else "--"  # there are ten colours
                    line[2].plot(range(1, len(shares) + 1), shares, style, marker="o", markersize=3, label=name)
        for axis in line[:2]:
            axis.set_yticks(range(len(names)), names)
            axis.invert_yaxis()
        line[0].set_xlabel(f"tokens/s, batch {batch}; tick: predicted")
        line[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
        line[1].set_xlabel("tokens a step")
        line[2].set_xlabel("position in the draft")
        line[2].set_ylabel(f"acceptance, {'greedy' if temperatures[0] == 0 else f'temperature {temperatures[0]:g}'}")
        line[2].set_ylim(0, 1.02)
        line[2].legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
