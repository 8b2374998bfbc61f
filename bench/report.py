"""python -m bench.report: README's tables and chart, from bench/results/*.json; `--check` exits 1 if they are old.

Everything between `<!-- bench:begin -->` and `<!-- bench:end -->` in README.md is replaced. Cases in which a rival is
faster stand in the tables like every other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from . import loop
from .machine import ROOT
from .results import FOLDER, LOOP, TRAFFIC

README = ROOT / "README.md"
CHART = ROOT / "docs" / "speed.png"
CURVE = ROOT / "docs" / "tree_cache.png"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
# The columns of the table: rivals by name, in order of appearance; others stand in the full file only.
COLUMNS = {
    "eager": "eager", "lazy eager": "lazy eager", "topk-first eager": "top-k first", "compiled eager": "compiled eager",
    "compiled lazy": "compiled lazy", "transformers": "transformers", "vLLM V1": "vLLM V1", "vLLM MRV2": "vLLM MRV2",
    "SGLang chain": "SGLang", "FlashInfer chain": "FlashInfer", "EAGLE's loop": "EAGLE's loop",
    "EAGLE's PyTorch": "EAGLE's PyTorch", "lazy walk": "lazy walk", "Medusa's Python": "Medusa's Python",
    "Medusa's PyTorch": "Medusa's PyTorch", "Python dictionaries": "dictionaries",
    "loop over requests": "loop over requests", "gather/scatter a layer": "gather/scatter a layer",
    "transformers crop + cat": "transformers crop + cat", "SGLang mover": "SGLang mover",
    "SGLang tree": "SGLang tree", "native SGLang tree": "native SGLang tree",
    "SDPA, dense mask": "SDPA, dense mask", "plain PyTorch": "plain PyTorch", "DynamicCache": "DynamicCache",
    "torch": "torch",
}  # fmt: skip
Row = dict[str, Any]


def result_files() -> list[Path]:
    """Committed results, GPUs first."""
    found = [p for p in FOLDER.glob("*.json") if p not in (TRAFFIC, LOOP)]
    return sorted(found, key=lambda p: (not is_gpu(json.loads(p.read_text())), p.name))


def is_gpu(content: Row) -> bool:
    """Whether a file's figures come from a GPU."""
    return "ceilings" in content


def by_case(content: Row) -> dict[tuple[str, str], dict[str, Row]]:
    """Rows of a file by (op, case), then by contender."""
    found: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in content["rows"]:
        if "p50_us" in row:
            found[row["op"], row["case"]][row["contender"]] = row
    return {key: rows for key, rows in found.items() if any(r["is_ours"] for r in rows.values())}


def duration(microseconds: float) -> str:
    """Three figures."""
    value, unit = (microseconds / 1000, "ms") if microseconds >= 1000 else (microseconds, "µs")
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def multiple(row: Row | None, ours: Row) -> str:
    """How many times longer a rival takes; below 1 it is faster."""
    if row is None:
        return ""
    ratio = row["p50_us"] / ours["p50_us"]
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"


def table(content: Row) -> list[str]:
    """Markdown tables of a file, one an op."""
    cases = by_case(content)
    lines: list[str] = []
    for op in dict.fromkeys(op for op, _ in cases):
        of_op = {case: rows for (o, case), rows in cases.items() if o == op}
        rivals = [c for c in COLUMNS if any(c in rows for rows in of_op.values())]
        has_stats = any(any("draft_stats" in c for c in rows) for rows in of_op.values())
        head = [f"`{op}`", "backend", "ours", *(["+ draft_stats"] if has_stats else [])]
        head += (["of copy bandwidth"] if is_gpu(content) else []) + [COLUMNS[c] for c in rivals]
        lines += ["", f"| {' | '.join(head)} |", f"|---|---|{'--:|' * (len(head) - 2)}"]
        for case, rows in of_op.items():
            for ours in (r for r in rows.values() if r["is_ours"] and "draft_stats" not in r["contender"]):
                stats = rows.get(f"{ours['contender']} + draft_stats")
                cells = [case, ours["contender"], duration(ours["p50_us"])]
                cells += [duration(stats["p50_us"]) if stats else ""] if has_stats else []
                cells += [f"{ours['of_copy']:.0%}" if "of_copy" in ours else ""] if is_gpu(content) else []
                cells += [multiple(rows.get(c), ours) for c in rivals]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def words(content: Row) -> str:
    """Machine, versions, commits of a file, and the ops in it."""
    facts = content["machine"]
    where = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores, {facts['simd']}"
    versions = content["rows"][0]["versions"]
    shown = ", ".join(f"{k} {v}" for k, v in versions.items() if k not in ("specdec_kernels",))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in content["rows"]))
    ceilings = content.get("ceilings")
    extra = f"; copy {ceilings['copy_gb_per_s']} GB/s measured in the same run" if ceilings else ""
    ops = ", ".join(f"<code>{op}</code>" for op in dict.fromkeys(op for op, _ in by_case(content)))
    return f"<b>{where}</b>: {ops} ({shown}; commit {commits}{extra})"


def folded(title: str, lines: list[str]) -> list[str]:
    """Lines that a page shows when somebody asks for them."""
    return ["", "<details>", f"<summary>{title}</summary>", *lines, "", "</details>"]


def generate(files: list[Path]) -> str:
    """The text between the markers."""
    lines = [BEGIN, "<!-- generated by python -m bench.report; do not edit -->"]
    if not files:
        return "\n".join([*lines, "Nothing has been timed yet: `python -m bench`.", *traffic_table(), END])
    lines += [
        "Medians; a rival's column says how many times longer it takes than ours without draft_stats (below 1: it is "
        "faster). Contenders take turns in one run, each checked against the reference first. Rows are shaped like a "
        "language model's at temperature 0.8, half of the drafts accepted ([bench/rows.py](bench/rows.py)). "
        "All cases, a fold for each machine:",
    ]
    if any(told(json.loads(file.read_text())) for file in files):
        lines += ["", f"![Speed beside PyTorch and transformers]({CHART.relative_to(ROOT)})"]
    if any(curves(json.loads(file.read_text())) for file in files):
        lines += ["", f"![A decode step against context length]({CURVE.relative_to(ROOT)})"]
    for file in files:
        content = json.loads(file.read_text())
        lines += folded(words(content), table(content))
    return "\n".join([*lines, *loop.table(), *traffic_table(), END])


def traffic_table() -> list[str]:
    """Bytes moved as multiples of MIN, ours with the budget, rivals where they were metered."""
    if not TRAFFIC.exists():
        return []
    content = json.loads(TRAFFIC.read_text())
    cases: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in content["rows"]:
        cases[f"`{row['op']}` {row['case']}"][row["contender"]] = row
    names = list(dict.fromkeys(r["contender"] for r in content["rows"] if "draft_stats" not in r["contender"]))
    title = (
        "<b>Bytes moved, as a multiple of what the rule must read</b> "
        '(<a href="bench/minimum.py">bench/minimum.py</a>), '
        'counted without a GPU (<a href="bench/meters.py">bench/meters.py</a>); <code>python -m bench.traffic</code>, '
        f"commit {content['rows'][0]['commit']}"
    )
    lines = [
        "",
        f"| case | budget | {' | '.join(names)} |",
        f"|---|--:|{'--:|' * len(names)}",
    ]
    for case, rows in cases.items():
        budget = next((str(r["budget"]) for r in rows.values() if r["budget"]), "")
        cells = [f"{rows[n]['times_min']:.3g}" if n in rows else "" for n in names]
        lines.append(f"| {case} | {budget} | {' | '.join(cells)} |")
    return folded(title, lines)


def insert(readme: str, text: str) -> str:
    """README with `text` between the markers; they are made before `## Building` where they are missing."""
    if BEGIN in readme and END in readme:
        return readme[: readme.index(BEGIN)] + text + readme[readme.index(END) + len(END) :]
    place = readme.find("## Building")
    place = len(readme) if place < 0 else place
    return f"{readme[:place].rstrip()}\n\n## Measured\n{text}\n\n{readme[place:]}"


def chart(files: list[Path], to: Path) -> None:
    """Bars of how many times longer each rival takes, one panel a machine, a few telling cases."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    panels = [(json.loads(f.read_text()), told(json.loads(f.read_text()))) for f in files]
    panels = [(content, cases) for content, cases in panels if cases]
    colours = dict(zip(COLUMNS, plt.get_cmap("tab10").colors, strict=False))
    height = sum(0.9 + 0.24 * sum(len(bars) + 1 for _, bars in cases) for _, cases in panels)
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, height), squeeze=False, layout="constrained")
    for axis, (content, cases) in zip(axes[:, 0], panels, strict=True):
        y, ticks = 0.0, []
        for label, bars in cases:
            first = y
            for name, ratio in bars:
                axis.barh(y, ratio, height=0.85, color=colours[name], left=0)
                shown = f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
                axis.text(ratio * 1.06, y, f"{shown}x  {COLUMNS[name]}", va="center", fontsize=8)
                y += 1
            ticks.append(((first + y - 1) / 2, label))
            y += 1
        axis.set_yticks([t for t, _ in ticks], [label for _, label in ticks], fontsize=8.5)
        axis.invert_yaxis()
        axis.set_xscale("log")
        widest = max(ratio for _, bars in cases for _, ratio in bars)
        axis.set_xlim(0.5, widest * 4)
        axis.axvline(1, color="black", linewidth=1)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}x"))
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
        facts = content["machine"]
        where = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores"
        axis.set_title(f"Time of a rival, specdec_kernels = 1x\n{where}", fontsize=10, loc="left")
    to.parent.mkdir(exist_ok=True)
    figure.savefig(to, dpi=150, metadata={"Software": None})
    plt.close(figure)


def curves(content: Row) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """(context length, ms) of each cache, by what was timed."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted((r for r in content["rows"] if r["op"] == "tree_cache"), key=lambda r: r["length"]):
        found[row["case"].partition(", context")[0]][row["contender"]].append((row["length"], row["p50_us"] / 1000))
    return found


def curve_chart(files: list[Path], to: Path) -> None:
    """Time against context length, a row of panels a machine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [(content, curves(content)) for content in (json.loads(f.read_text()) for f in files)]
    shown = [(content, found) for content, found in shown if found]
    figure, axes = plt.subplots(len(shown), 2, figsize=(9, 3.4 * len(shown)), squeeze=False, layout="constrained")
    for row, (content, found) in zip(axes, shown, strict=True):
        facts = content["machine"]
        where = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores"
        for axis, (case, lines) in zip(row, found.items(), strict=False):
            for name, points in lines.items():
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
            axis.set_title(f"{case}\n{where}", fontsize=8, loc="left")
            axis.set_xlabel("context length", fontsize=8)
            axis.set_ylabel("ms", fontsize=8)
            axis.set_ylim(bottom=0)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(fontsize=8)
    figure.savefig(to, dpi=150, metadata={"Software": None})
    plt.close(figure)


def told(content: Row) -> list[tuple[str, list[tuple[str, float]]]]:
    """Cases of the chart: llama-3's vocabulary, five drafts, and sample."""
    found = []
    for (op, case), rows in by_case(content).items():
        if op not in ("verify_chain", "sample"):
            continue
        ours = next(r for r in rows.values() if r["is_ours"])
        usual = ours["vocab"] == 128256 and ours["rows"] == "llm" and ours["rule"] == "ratio" and not ours["threads"]
        is_shown = (op == "verify_chain" and ours["draft"] == 5 and ours["filters"] in ("none", BOTH)) or (
            op == "sample" and ours["filters"] == "none"
        )
        bars = [(c, rows[c]["p50_us"] / ours["p50_us"]) for c in COLUMNS if c in rows]
        if usual and is_shown and bars and ours["batch"] in (1, 16, 64):
            label = case.removeprefix("llama-3 128256, ").replace(f", {BOTH}", f"\n{BOTH}")
            found.append((f"{op}\n{label}", bars))
    return found[:8]


BOTH = "top-k 50 + top-p .95"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if README.md is out of step")
    chosen = parser.parse_args()
    files = result_files()
    before = README.read_text()
    after = insert(before, generate(files))
    if chosen.check:
        sys.exit(0 if before == after else "README.md is out of step with bench/results: python -m bench.report")
    README.write_text(after)
    for draws, to, has in ((chart, CHART, told), (curve_chart, CURVE, curves)):
        if any(has(json.loads(f.read_text())) for f in files):
            draws(files, to)
            print(f"wrote {to.relative_to(ROOT)}")
    print(f"README.md: {'changed' if before != after else 'unchanged'}, {len(files)} result files")


if __name__ == "__main__":
    main()
