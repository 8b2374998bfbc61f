"""python -m bench.loop: time every decoding method on the repository's models, about half an hour on two cores.

`python -m bench.report` puts the numbers into docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from specdec_loop.cli import main as specdec_loop
from specdec_loop.cli.measure import Row

from .machine import ROOT, commit, machine, versions
from .results import LOOP, write
from .tables import markdown

STORE = ROOT / "build" / "datastore.pt"
# Drafters of a lone request in bfloat16: their weights are read in half the time. Several rows at once are multiplied
# faster in float32 by most CPUs.
# More prompts tell more than more rounds: texts differ more from each other than runs of one do.
RUNS = (
    ["--batch", "1", "--rounds", "1", "--max-new-tokens", "64", "--draft-dtype", "bfloat16", "--rivals"],
    # Two calls of eight prompts. A fast request leaves its place empty, which an engine would fill: longer texts make
    # the end of a call weigh less.
    ["--batch", "8", "--rounds", "8", "--max-new-tokens", "128"],
)
COMMON = ["--temperature", "0", "0.7", "1", "--count", "16"]
ABOUT = (
    "Tokens per second of whole calls, prefill included, on 16 held-out code prompts of 57 to 64 tokens, the median "
    "round's; in brackets times plain decoding just before and after, likewise. The methods take turns on every "
    "prompt, and plain decoding runs again after every fourth. "
    "*Same text*: every text equals plain decoding's with the same seed. *Same distribution*: a greedy text is equal, "
    "a sampled one follows the same distribution ([losslessness](losslessness.md)). "
    "[Drafters](drafters.md) describes the methods; `python -m specdec_loop compare --list` prints one line for each.",
)


def main() -> None:
    """Measure by the command line that users have, and keep what it wrote."""
    rows = []
    if not STORE.exists() and (status := specdec_loop(["datastore", "build", "--out", str(STORE)])):
        sys.exit(status)
    for run in RUNS:
        more = ["--datastore", str(STORE), "--json", str(LOOP)]
        if status := specdec_loop(["compare", *COMMON, *run, *sys.argv[1:], *more]):
            sys.exit(status)
        rows += json.loads(LOOP.read_text())["rows"]
    settings = [" ".join([*COMMON, *run]) for run in RUNS]
    facts = {"machine": machine(), "versions": versions(), "commit": commit(), "settings": settings}
    write(LOOP, {**facts, "rows": rows})


def section(content: dict[str, Any]) -> list[str]:
    """Markdown: what was run, a table for each batch size, and figures that hold for all methods."""
    rows, facts = content["rows"], content["machine"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    names = ["greedy" if t == 0 else f"T = {t:g}" for t in temperatures]
    software = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    predicted = [r["tokens_per_second"] / p for r in rows if (p := r["predicted_tokens_per_second"])]
    rests = [share for row in rows if (share := Row(**row).rest) is not None]
    distinct = {row["temperature"]: row["distinct"] for row in rows if row["method"] == "plain" and row["batch"] == 1}
    repeats = ", ".join(f"{share:.0%} ({name})" for name, share in zip(names, distinct.values(), strict=False))
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores ({software}; commit `{content['commit']}`).",
        *ABOUT,
        "",
        f"- Measured speed is {min(predicted):.2f} to {max(predicted):.2f} times the speed that theory predicts from "
        "the acceptance and the times of the same run.",
        f"- Drafting (outside its networks), verification and commit take {min(rests):.1%} to {max(rests):.1%} of a "
        "step; forward passes take the rest.",
        f"- The small target repeats itself: of the 4-grams in its text, {repeats} are different. Repetition helps "
        "methods that copy.",
        "",
        "Commands, run by `python -m bench.loop`:",
        "",
        "```sh",
        *(f"python -m specdec_loop compare {setting}" for setting in content["settings"]),
        "```",
    ]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        head = [f"tokens/s, {name}" for name in names] + [f"tokens/step, {name}" for name in names]
        cases: dict[str, dict[float, dict[str, Any]]] = {}
        for row in rows:
            if row["batch"] == batch:
                cases.setdefault(row["method"], {})[row["temperature"]] = row
        cells = [[method, *numbers([of.get(t) for t in temperatures])] for method, of in cases.items()]
        lines += ["", f"Batch {batch}. In brackets: speed relative to `plain` at the same temperature."]
        lines += markdown(["method", *head, "text"], cells, right=range(1, len(head) + 1))
    return lines


def numbers(rows: list[dict[str, Any] | None]) -> list[str]:
    """Cells of one method: speeds, tokens per step, and whether the text is plain decoding's."""
    speeds = [f"{r['tokens_per_second']:.0f} ({r['speedup']:.2f})" if r else "" for r in rows]
    steps = [f"{r['tokens_per_step']:.2f}" if r and r["tokens_per_step"] else "" for r in rows]
    if not any(steps):
        return [*speeds, *steps, ""]
    told = [row["same_text"] for row in rows if row]
    if None in told:
        return [*speeds, *steps, "same distribution"]
    same, of = (sum(int(text.split("/")[side]) for text in told) for side in (0, 1))
    return [*speeds, *steps, "same text" if same == of else f"same text: {same} of {of}"]


if __name__ == "__main__":
    main()
