"""Launches past `JITFunction.run` are those that it would make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What direct_launches.py prints."""
    pytest.importorskip("triton")
    script = Path(__file__).parent / "direct_launches.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_a_known_kernel_gets_what_run_would_give_it(found: dict[str, Any]) -> None:
    """The same compiled kernel, grid, stream and arguments, for every alignment, dtype, class of number and record."""
    assert found["small kernels"] == []


def test_every_launch_of_the_ops_on_rows_is_the_one_of_run(found: dict[str, Any]) -> None:
    """And each one that was seen before goes past it."""
    assert {name: faults for name, faults in found.items() if faults and name != "watched"} == {}
    assert len(found) > 20


def test_run_launches_where_somebody_watches_it(found: dict[str, Any]) -> None:
    by_run = dict(found["watched"])
    assert by_run.pop("nothing") is False and by_run.pop("debugging, then") is False
    assert by_run.pop("debugging, first") is True
    assert len(by_run) == 8 and all(by_run.values()), by_run
