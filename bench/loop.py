"""python -m bench.loop: every decoding method on the repository's models, for README's table and docs/loop.png.

It takes up to twenty-five minutes on two cores. `python -m bench.report` puts the numbers into README.md.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from specdec_loop.cli import main as specdec_loop
from specdec_loop.cli.measure import Row
from specdec_loop.cli.report import write_chart

from .machine import ROOT, commit, machine, versions
from .results import LOOP, write

CHART = ROOT / "docs" / "loop.png"
STORE = ROOT / "build" / "datastore.pt"
# Batch 8 is two calls of eight prompts. A fast request leaves its place empty, which an engine would fill: longer texts
# make the end of a call weigh less.
BATCHED = (
    "plain",
    "suffix",
    "draft-model-block",
    "eagle2",
    "mtp",
    "mtp-suffix",
    "mtp-block",
    "mtp-block-auto",
    "mtp-tree",
)
# Drafters of a lone request in bfloat16: their weights are read in half the time. Several rows at once are multiplied
# faster in float32 by most CPUs.
# More prompts tell more than more rounds: texts differ more from each other than runs of one do.
RUNS = (
    ["--batch", "1", "--rounds", "1", "--max-new-tokens", "64", "--draft-dtype", "bfloat16", "--rivals"],
    ["--batch", "8", "--rounds", "2", "--max-new-tokens", "128", "--methods", *BATCHED],
)
COMMON = ["--temperature", "0", "0.7", "1", "--count", "16"]
ABOUT = (
    "Tokens/s of whole calls on held-out code behind 64 tokens of prompt, all methods taking turns on every prompt. "
    "*Speed-up*: beside plain decoding of the same loop. *Theory*: measured speed over that predicted from the "
    "acceptance and the times of the same run. *Rest*: share of a step outside all forwards, the target's and the "
    "drafter's: drafting, verify and commit. "
    "*4-grams*: share of different ones in the text; small models repeat themselves when greedy, which flatters "
    "copying. *Text*: how many texts are plain decoding's; *distribution*: same distribution (`make lossless`)."
)
HEAD = "| {} | tokens/s | speed-up | tokens/step | accepted | theory | rest | 4-grams | text |"


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
    write_chart([Row(**row) for row in rows], CHART)


def table() -> list[str]:
    """Markdown, a table for each batch and temperature."""
    if not LOOP.exists():
        return []
    content = json.loads(LOOP.read_text())
    facts, shown = content["machine"], ", ".join(f"{k} {v}" for k, v in content["versions"].items())
    where = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores"
    lines = ["", f"**Decoding on the repository's models**, {where} ({shown}; commit {content['commit']}); "]
    settings = ", ".join(f"`{setting}`" for setting in content["settings"])
    lines += [f"`python -m bench.loop`, of `compare` {settings}", "", ABOUT, ""]
    lines += [f"![Decoding methods]({CHART.relative_to(ROOT)})"]
    for batch, temperature in dict.fromkeys((row["batch"], row["temperature"]) for row in content["rows"]):
        kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        lines += ["", HEAD.format(f"{kind}, batch {batch}"), "|---|" + "--:|" * 8]
        for row in content["rows"]:
            if (row["batch"], row["temperature"]) == (batch, temperature):
                lines.append(f"| {' | '.join([row['method'], *cells(row)])} |")
    return lines


def cells(row: dict[str, Any]) -> list[str]:
    """Of one method."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    predicted, rest = row["predicted_tokens_per_second"], Row(**row).rest
    return [
        number(row["tokens_per_second"], ".0f"),
        number(row["speedup"], ".2f"),
        number(row["tokens_per_step"], ".2f"),
        number(row["acceptance"], ".2f"),
        number(row["tokens_per_second"] / predicted if predicted else None, ".2f"),
        number(rest, ".1%"),
        number(row["distinct"], ".2f"),
        row["same_text"] or ("distribution" if predicted else ""),
    ]


if __name__ == "__main__":
    main()
