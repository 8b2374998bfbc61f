"""Look for data races of the CUDA kernels, and for the faults that must show: `python -m tests.race` (docs/races.md).

Every call of cases.py runs on the CUDA sources, compiled for the host with the compiler's ThreadSanitizer pass and our
detector (detector.cpp). No race may be reported, every kernel must have run, and every fault of twins.py, put into a
copy of the sources, must be reported. `--page docs/races.md` writes the table of that page; without it the table must
be that of the page.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.native.build import build

from .twins import TWINS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/races.md"
COPY = ROOT / "build/race/csrc"
START, END = "<!-- twins -->\n", "<!-- /twins -->\n"


def copy_with_twins() -> None:
    """The sources with every fault in its place, none of them at work."""
    texts = {path: path.read_text() for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()}
    for number, twin in enumerate(TWINS, 1):
        path = ROOT / "csrc/cuda" / twin.file
        if texts[path].count(twin.old) != 1:
            raise ValueError(f"{twin.name}: {twin.file} holds {twin.old!r} {texts[path].count(twin.old)} times")
        texts[path] = texts[path].replace(twin.old, twin.new.replace("TWIN", f"(race_twin == {number})"))
    shutil.rmtree(COPY, ignore_errors=True)
    for path, text in texts.items():
        target = COPY / path.relative_to(ROOT / "csrc")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def place_of(story: str) -> str:
    """The access of a report as `load in tile.cuh`: the innermost file behind the accessors of global memory."""
    places = [place for place in re.findall(r"csrc/cuda/(\S+):\d+", story) if place != "global.cuh"]
    return f"{story.split()[0]} in {places[0]}"


def table(verdicts: list[str | None]) -> str:
    """The faults and what was reported, in Markdown."""
    rows = ["| fault | source | reported |", "|---|---|---|"]
    for twin, verdict in zip(TWINS, verdicts, strict=True):
        found = "nothing"
        if verdict is not None:
            memory = re.search(r"data race in (\w+) memory: ", verdict)
            assert memory is not None
            later, _, earlier = verdict[memory.end() :].partition("is not ordered behind the ")
            found = f"{memory[1]} memory: {place_of(later)} after {place_of(earlier)}"
        rows.append(f"| {twin.name} | `{twin.file}` | {found} |")
    return "\n".join(rows) + "\n"


def faults(clean: dict[str, Any], twin: dict[str, Any]) -> list[str]:
    """Everything that the two runs have found."""
    found = [f"{name}: {race}" for name, race in clean["races"].items()]
    found += [f"no call of tests/race/cases.py launches {name}" for name in clean["missing"]]
    found += [f"without the fault, {name}: {race}" for name, race in twin["races"].items()]
    return found + [f"not seen: {one.name}" for one, it in zip(TWINS, twin["verdicts"], strict=True) if it is None]


def in_process(kind: str, library: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.race.run", kind, str(library)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def result(run: subprocess.Popen[str]) -> dict[str, Any]:
    """What a process has found."""
    text = run.communicate()[0]
    if run.returncode != 0:
        raise RuntimeError(f"{run.args} ended with {run.returncode}")
    found: dict[str, Any] = json.loads(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="write the table of this page")
    options = parser.parse_args()
    start = time.perf_counter()
    clean_run = in_process("clean", build("race"))
    copy_with_twins()
    twin_run = in_process("twins", build("race", COPY))
    clean, twin = result(clean_run), result(twin_run)
    found = faults(clean, twin)
    page = PAGE.read_text()
    before, after = page.split(START)[0], page.split(END)[1]
    wanted = before + START + table(twin["verdicts"]) + END + after
    if options.page:
        options.page.write_text(wanted)
    elif page != wanted and not found:
        found.append("docs/races.md does not show these reports (make race RACE='--page docs/races.md')")
    print("\n".join(found))
    seen = sum(one is not None for one in twin["verdicts"])
    print(
        f"race: {clean['calls']} calls of {clean['kernels']} kernels, {len(clean['races'])} with a race;"
        f" {seen} of {len(TWINS)} faults reported; {time.perf_counter() - start:.0f} s"
        f" ({clean['seconds']:.0f} s of calls, {twin['seconds']:.0f} s with faults)"
    )
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
