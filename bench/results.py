"""bench/results/<machine>.json: a row for a contender and case, each with its versions and its commit."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from .cases import Case, Measured
from .json_rows import read, write
from .machine import ROOT, commit, machine, slug, versions

FOLDER = Path(__file__).parent / "results"
TRAFFIC = FOLDER / "traffic.json"
TRAFFIC_FULL = FOLDER / "traffic-full.json"
LOOP = FOLDER / "loop.json"


def path() -> Path:
    """File of this machine."""
    return FOLDER / f"{slug()}.json"


def load(file: Path) -> dict[str, Any]:
    """A result file, or an empty one for this machine."""
    return read(file) if file.exists() else {"machine": machine(), "rows": []}


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


__all__ = ["FOLDER", "ROOT", "TRAFFIC", "TRAFFIC_FULL", "load", "path", "save", "write"]
