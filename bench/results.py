"""bench/results/<machine>.json: a row for a contender and case, each with its versions and its commit."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .cases import Case, Measured
from .machine import ROOT, commit, machine, slug, versions

FOLDER = Path(__file__).parent / "results"
TRAFFIC = FOLDER / "traffic.json"
LOOP = FOLDER / "loop.json"
GPU_MODEL = FOLDER / "gpu-model.json"  # of tools/gpu_model


def path() -> Path:
    """File of this machine."""
    return FOLDER / f"{slug()}.json"


def load(file: Path) -> dict[str, Any]:
    """A result file, or an empty one for this machine."""
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return {"machine": machine(), "rows": []}


def save(case: Case, measured: dict[str, tuple[Measured, bool]], file: Path | None = None) -> None:
    """Replace the rows of a case."""
    file = file or path()
    content = load(file)
    ours = next(m for m, is_ours in measured.values() if is_ours)
    fresh = [
        {
            "op": case.op,
            "case": case.name,
            **{k: v for k, v in dataclasses.asdict(case).items() if k not in ("op", "compiled")},
            "contender": name,
            "is_ours": is_ours,
            **{f"{k}_us" if k != "runs" else k: v for k, v in m._asdict().items()},
            "times_ours": round(m.p50 / ours.p50, 3),
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
            "versions": versions(),
        }
        for name, (m, is_ours) in measured.items()
    ]
    content["rows"] = [r for r in content["rows"] if (r["op"], r["case"]) != (case.op, case.name)] + fresh
    write(file, content)


def write(file: Path, content: dict[str, Any]) -> None:
    """One row a line, so that a difference can be read."""
    rows: Iterable[Any] = content.pop("rows")
    head = json.dumps(content, indent=1)[:-2]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    content["rows"] = rows
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')


__all__ = ["FOLDER", "ROOT", "TRAFFIC", "load", "path", "save", "write"]
