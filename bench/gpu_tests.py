"""A pytest plugin of gpu.sh: counts the tests of a step in the file of the GPU while they run, and names failures."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from .gpu_file import note

EVERY = 2.0  # seconds between two writes
NAMED = 40  # failures that are told with their reason


class Recorder:
    """What has been seen of a run so far."""

    def __init__(self, file: Path, step: str) -> None:
        self.file, self.step = file, step
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures: list[dict[str, str]] = []
        self.written = 0.0
        note(file, step, begins=True, verdict="under way")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test once: when it has run, or where its fixtures failed or skipped it."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.fail(report.nodeid, report)
        self.save()

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported."""
        if report.failed:
            self.counts["failed"] += 1
            self.fail(f"collection of {report.nodeid}", report)
            self.save(now=True)

    def fail(self, name: str, report: Any) -> None:
        """Keep the name and the last line of a failure."""
        if len(self.failures) < NAMED:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else str(report.longrepr).strip().splitlines()[-1]
            self.failures.append({"test": name, "why": why.splitlines()[0][:300] if why else ""})

    def save(self, *, now: bool = False) -> None:
        """Write what there is."""
        if now or time.monotonic() - self.written > EVERY:
            note(self.file, self.step, **self.counts, failures=self.failures)
            self.written = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        """All of it."""
        self.save(now=True)


def pytest_configure(config: Any) -> None:
    """Record in the process that sees every report, not in the workers of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(os.environ["GPU_FILE"]), os.environ["GPU_STEP"]))
