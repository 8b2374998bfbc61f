"""The charts of docs/benchmarks.md: 900 pixels wide on a page, at most three colours, labels beside the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec_loop.cli.measure import Row as Measured
from specdec_loop.cli.report import write_chart

from .highlights import highlights
from .tables import Row, label, machine_name

OURS, RIVAL, OTHER, INK = "#0072B2", "#D55E00", "#A0A0A0", "#333333"
# Cases of the chart of bytes; rivals move fewer bytes in some.
TRAFFIC = (
    ("verify_chain", "llama-3 128256, batch 1, K 5, bf16", "5 drafts"),
    ("verify_chain", "llama-2 32000, batch 1, K 2, bf16, top-k 50 + top-p .95", "2 drafts, top-k and top-p"),
    ("sample", "llama-2 32000, batch 2, bf16", "batch 2"),
    ("verify_tree", "llama-2 32000, 16 nodes, batch 64, fp32, match", "rule match"),
    ("verify_tree", "llama-2 32000, 16 nodes, batch 8, bf16, greedy", "rule greedy"),
    ("compact_cache", "8B-like 32 layers, batch 1, bhld", "batch 1"),
    ("tree_attention", "16 nodes, batch 1, past 512, bf16, bhld", "16 nodes"),
    ("tree_mask", "additive bf16, past 2048, 64 nodes, batch 1", "additive mask"),
    ("tree_mask", "flat, past 2048, 64 nodes, batch 1", "flat mask"),
)
FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"


def canvas(height: float, message: str, details: str) -> tuple[Any, Any]:
    """(figure, axis) nine inches wide, without a window: the message in bold, below it what is shown and where."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, height), layout="constrained")
    figure.suptitle(f"{message}\n", x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.text(0.01, 1 - 0.4 / height, details, ha="left", va="center", fontsize=9.5, color=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9.5, labelcolor=INK, color=OTHER)
    return figure, axis


def save(figure: Any, path: Path) -> None:
    """As a PNG that does not change with the date."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    shrink(path)


def shrink(path: Path) -> None:
    """Keep 48 colours: a third of the bytes, and no difference to the eye."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(48, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def factor_axis(axis: Any, ticks: list[float], text: str) -> None:
    """A logarithmic axis of factors with ticks that people read."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}x"))
    axis.set_xlabel(text, fontsize=9.5, color=INK)
    axis.tick_params(axis="y", length=0)


def as_multiple(ratio: float) -> str:
    """Two figures."""
    return f"{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x"


def lanes(axis: Any, rows: list[list[tuple[str, float]]]) -> None:
    """A line of dots for each case, rivals in order: the first is orange and named, the last is named."""
    for y, timed in enumerate(rows):
        rivals = [(name.removesuffix(" (launched)"), ratio) for name, ratio in timed]
        ratios = [ratio for _, ratio in rivals]
        axis.plot([min(1, ratios[0]), max(1, ratios[-1])], [y, y], color="#DDDDDD", linewidth=1.2, zorder=1)
        axis.plot(ratios[1:], [y] * (len(ratios) - 1), "o", color=OTHER, markersize=7, zorder=2)
        axis.plot(ratios[:1], [y], "o", color=RIVAL, markersize=8.5, zorder=3)
        name, ratio = rivals[0]
        place, side = (ratio / 1.06, "left") if ratio < 3 else (ratio, "center")
        axis.text(place, y - 0.2, f"{name} {as_multiple(ratio)}", ha=side, va="bottom", fontsize=9.5, color=RIVAL)
        if len(rivals) > 1:
            name, ratio = rivals[-1]
            axis.text(ratio * 1.12, y, f"{name} {as_multiple(ratio)}", va="center", fontsize=9.5, color="#666666")
    axis.set_ylim(len(rows) - 0.4, -0.9)


def rivals(contents: list[Row], path: Path) -> None:
    """Every rival's time as a multiple of ours, a line a case."""
    shown = highlights(contents)
    details = "Dots: time of another implementation on the same inputs, orange the fastest. A GPU, or two CPU cores."
    figure, axis = canvas(1.5 + 0.58 * len(shown), "How much longer other implementations take", details)
    lanes(axis, [h.entry.rivals for h in shown])
    axis.axvline(1, color=OURS, linewidth=2.5, zorder=0)
    axis.text(1.05, -0.62, "specdec_kernels = 1x", color=OURS, fontsize=9.5, va="center", fontweight="bold")
    machines = [h.machine.replace(" Processor", "").removesuffix(", 2 cores") for h in shown]
    labels = [f"{h.entry.op}, {h.task}\n{machine}" for h, machine in zip(shown, machines, strict=True)]
    axis.set_yticks(range(len(shown)), labels, linespacing=1.25)
    axis.set_xlim(0.32, max(h.entry.rivals[-1][1] for h in shown) * 3.5)
    factor_axis(
        axis,
        [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500],
        "time relative to ours, log scale (below 1x the rival is faster)",
    )
    save(figure, path)


def traffic(content: Row, path: Path) -> None:
    """Bytes that each implementation moves as a multiple of the minimum, a line a case."""
    cases = {case: [r for r in content["rows"] if (r["op"], r["case"]) == case[:2]] for case in TRAFFIC}
    details = "Blue: ours (Triton). Orange: the rival that moves the fewest bytes; grey: the others. Counted on a CPU."
    figure, axis = canvas(1.5 + 0.6 * len(cases), "Bytes moved, as a multiple of the minimum", details)
    rivals = [sorted((r["times_min"], label(r)) for r in rows if not r["is_ours"]) for rows in cases.values()]
    lanes(axis, [[(name, times) for times, name in some] for some in rivals])
    axis.axvline(1, color=INK, linewidth=1, zorder=0)
    for y, rows in enumerate(cases.values()):
        ours = next(row["times_min"] for row in rows if row["contender"] == "triton")
        axis.plot(ours, y, "o", color=OURS, markersize=8.5, zorder=4)
        if y == 0 or ours > 1.2:
            axis.text(ours, y + 0.2, f"ours {as_multiple(ours)}", ha="left", va="top", fontsize=9.5, color=OURS)
    axis.set_yticks(range(len(cases)), [f"{op}, {task}" for op, _, task in cases])
    axis.set_xlim(0.6, 500)
    factor_axis(axis, [1, 2, 5, 10, 20, 50, 100], "bytes read and written / bytes that must be moved, log scale")
    save(figure, path)


def caches(contents: list[Row], path: Path) -> None:
    """Time of a decode step over the length of the context, with each cache."""
    content = next(c for c in contents if any(row["op"] == "tree_cache" for row in c["rows"]))
    rows = [r for r in content["rows"] if r["op"] == "tree_cache" and r["case"].startswith("decode step")]
    shape = rows[0]["case"].removeprefix("decode step, ").partition(", context")[0]
    details = f"One decode step of a transformers model: {shape}. {machine_name(content)}."
    figure, axis = canvas(3.8, "A long context slows DynamicCache far more than TreeCache", details)
    for name, colour in (("DynamicCache", RIVAL), ("TreeCache", OURS)):
        points = sorted((row["length"], row["p50_us"] / 1000) for row in rows if row["contender"] == name)
        axis.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=2)
        longest, last = points[-1]
        axis.text(longest * 1.015, last, f"{name}\n{last:.0f} ms", va="center", fontsize=10, color=colour)
    lengths = sorted({row["length"] for row in rows})
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.set_xlim(0, lengths[-1] * 1.17)
    axis.set_ylim(0, None)
    axis.set_xlabel("tokens in the cache", fontsize=9.5, color=INK)
    axis.set_ylabel("ms per step", fontsize=9.5, color=INK)
    save(figure, path)


def methods(content: Row, path: Path) -> None:
    """Speed of each decoding method relative to plain decoding."""
    facts = content["machine"]
    write_chart([Measured(**row) for row in content["rows"]], path, f"{facts['cpu']}, {facts['cores']} cores")
    shrink(path)


def draw(contents: list[Row], decoding: Row, moved: Row, folder: Path = FOLDER) -> None:
    """All of them."""
    rivals(contents, folder / "rivals.png")
    methods(decoding, folder / "methods.png")
    caches(contents, folder / "caches.png")
    traffic(moved, folder / "traffic.png")
