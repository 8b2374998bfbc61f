"""bench/results/simulated.json: what was simulated, one line a case, written as it comes."""

from __future__ import annotations

import datetime
import fcntl
import json
import subprocess
from typing import Any

from ..gpu_model.__main__ import dump
from .gpgpusim import BUILD, ROOT

PATH = ROOT / "bench/results/simulated.json"


def load() -> dict[str, Any]:
    """The committed results."""
    return json.loads(PATH.read_text()) if PATH.exists() else {"functional": {}, "timed": {}}  # type: ignore[no-any-return]


def note(part: str, place: str, name: str, found: dict[str, Any]) -> None:
    """Put one outcome in its place, with the day and the commit that it was made at."""
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    stamped = found | {"date": datetime.date.today().isoformat(), "commit": commit.strip()}
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # several runs may write
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = load()
        content[part].setdefault(place, {})[name] = stamped
        PATH.write_text(dump(content, 3) + "\n")
