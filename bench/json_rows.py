"""A result file: a header and rows, one row a line so that a difference can be read. No torch: gpu.sh notes with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read(file: Path) -> dict[str, Any]:
    """The content, or what an empty file has."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": []}
    return found


def write(file: Path, content: dict[str, Any]) -> None:
    """Replace the file at once: a run that is stopped in between leaves the one before."""
    head = json.dumps({name: value for name, value in content.items() if name != "rows"}, indent=1)[:-2]
    lines = ",\n  ".join(json.dumps(row) for row in content["rows"])
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')
    partial.replace(file)
