"""Progress on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between lines


@contextmanager
def progress(first: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show `first`, then what is reported as ``(done, total, description)``."""
    if sys.stderr.isatty():
        columns = TextColumn("{task.description:>40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(first, total=None)
            yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
        return
    latest = time.monotonic() - EVERY

    def line(done: int, total: int, what: str) -> None:
        nonlocal latest
        now = time.monotonic()
        if now - latest >= EVERY or done == total:
            print(f"{done}/{total} {what}", file=sys.stderr, flush=True)
            latest = now

    print(first, file=sys.stderr, flush=True)
    yield line
