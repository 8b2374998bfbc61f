"""python -m bench.gpu_file FILE STEP VERDICT SECONDS LOG: notes a step of gpu.sh in the file of its GPU. No torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from .json_rows import read, write

KEPT_LINES = 15


def note(file: Path, step: str, **facts: Any) -> None:
    """Add facts to a step; a step that ran before is replaced where it begins anew (`begins=True`)."""
    content = read(file)
    steps = content.setdefault("steps", [])
    found = next((s for s in steps if s["step"] == step), None)
    if found is None or facts.pop("begins", False):
        fresh = {"step": step}
        content["steps"] = [s for s in steps if s["step"] != step] + [fresh]
        found = fresh
    found.update({name: value for name, value in facts.items() if name != "begins"})
    write(file, content)


def end_of(log: Path) -> list[str]:
    """The last lines of a log, without terminal codes and without the path of this folder."""
    here = str(Path(__file__).resolve().parents[1])
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace")).replace(here, ".")
    return [line[:300] for line in text.splitlines() if line.strip()][-KEPT_LINES:]


def main() -> None:
    """Command line."""
    file, step, verdict, seconds, log = sys.argv[1:]
    facts: dict[str, Any] = {"verdict": verdict, "seconds": int(seconds)}
    lines = end_of(Path(log))
    if verdict == "skipped":
        facts["reason"] = lines[-1] if lines else ""
    elif verdict != "ok":
        facts["end_of_log"] = lines
    note(Path(file), step, **facts)


if __name__ == "__main__":
    main()
