"""Inject faults one at a time, run the tests that must see them, list the survivors: `make mutants`.

Works on copies of the tree in build/mutants, one a worker. Results are kept in build/mutants/results.json by name and
contents, so an interrupted run goes on. Exit status 1 if fewer than 95 % of the faults that change behaviour are caught
or a survivor is not explained in survivors.toml.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import tomllib
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .mutant import Mutant, patches, sampled

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WORK = ROOT / "build" / "mutants"
WANTED = 0.95
SECONDS = 900  # of a processor: a test run that takes longer has met an endless loop, and the fault is seen
WAIT = 4 * SECONDS  # the same for a run that waits for ever; the clock also counts what else a machine does


class Tree:
    """A copy of the repository that faults are put into."""

    def __init__(self, number: int, python: str) -> None:
        """Copy what git tracks, and the built library with its objects."""
        self.root, self.python = WORK / f"tree{number}", python
        self.sound: set[tuple[str, ...]] = set()  # tests that pass without a fault
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.splitlines():
            source, target = ROOT / name, self.root / name
            if source.exists() and (not target.exists() or target.read_bytes() != source.read_bytes()):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        self.environment = os.environ | {
            "PYTHONPATH": f"{self.root}:{self.root / 'python'}",
            "SPECDEC_BUILD_CUDA": "0",
            "MAX_JOBS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.built = [self.root / "build", self.root / "specdec_kernels" / "_cpu.abi3.so"]
        self.build()
        self._copy_built(self.root, WORK / f"built{number}")

    def build(self) -> bool:
        """Bring the native library up to date with the sources; False if they do not compile."""
        command = [self.python, "setup.py", "--quiet", "build_ext", "--inplace"]
        return self._run(command).returncode == 0

    def restore(self) -> None:
        """Put back what was built of the sources without a fault: faster than building it again."""
        self._copy_built(WORK / self.root.name.replace("tree", "built"), self.root)

    def _copy_built(self, source: Path, target: Path) -> None:
        for path in self.built:
            name = path.relative_to(self.root)
            if path.is_dir():
                shutil.rmtree(target / name, ignore_errors=True)
                shutil.copytree(source / name, target / name)
            else:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, target / name)

    def failing(self, tests: tuple[str, ...]) -> tuple[str, ...]:
        """Nothing if the tests pass; else the first that fails, or all where pytest was ended before it named one."""
        command = [self.python, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:randomly"]
        try:
            ran = self._run([*command, *tests])
        except subprocess.TimeoutExpired:
            return tests
        if ran.returncode == 0:
            return ()
        named = re.search(r"(?m)^(?:FAILED|ERROR) (tests/\S+?\.py::.*?)(?: - .*)?$", ran.stdout)
        return (named[1],) if named else tests

    def judge(self, mutant: Mutant) -> str:
        """What the tests say of a fault: caught or survived. The test that sees it must pass without it."""
        path = self.root / mutant.path
        kept, times = path.read_text(), path.stat()
        path.write_text(mutant.text)
        try:
            if mutant.build and not self.build():
                return "does not compile"
            failing = self.failing(mutant.tests)
        finally:
            path.write_text(kept)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            if mutant.build:
                self.restore()
        if failing and failing not in self.sound:
            if self.failing(failing):
                raise SystemExit(f"mutants: without any fault, pytest {' '.join(failing)} fails")
            self.sound.add(failing)
        return "caught" if failing else "survived"

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=WAIT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS)),
        )  # fmt: skip


def main() -> int:
    """Run what is asked for; 1 where too few faults are caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="only mutants whose name holds this")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="copies of the tree at work")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has torch and pytest")
    parser.add_argument("--list", action="store_true", help="list the mutants and stop")
    args = parser.parse_args()
    targets = tomllib.loads((HERE / "targets.toml").read_text())["target"]
    table = tomllib.loads((HERE / "patches.toml").read_text())["patch"]
    known = {e["name"]: e["reason"] for e in tomllib.loads((HERE / "survivors.toml").read_text()).get("survivor", [])}
    mutants = [*patches(ROOT, table), *(m for target in targets for m in sampled(ROOT, target))]
    chosen = [m for m in mutants if args.only in m.name]
    if args.list:
        print("\n".join(m.name for m in chosen))
        return 0
    verdicts = run(chosen, args.jobs, args.python)
    return report(chosen, verdicts, known)


def run(mutants: list[Mutant], jobs: int, python: str) -> dict[str, str]:
    """Verdicts by name; those of an earlier run over the same faults are kept."""
    file = WORK / "results.json"
    kept: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    keys = {m.name: hashlib.sha256(repr((m.path, m.text, m.tests)).encode()).hexdigest()[:16] for m in mutants}
    waiting = [m for m in mutants if keys[m.name] not in kept]
    lock = threading.Lock()

    columns = (TextColumn("mutants"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Tree] = SimpleQueue()
        for tree in pool.map(lambda i: Tree(i, python), range(jobs)):
            free.put(tree)
        task = progress.add_task("", total=len(waiting))

        @contextmanager
        def borrowed() -> Iterator[Tree]:
            tree = free.get()
            try:
                yield tree
            finally:
                free.put(tree)

        def judge(mutant: Mutant) -> None:
            with borrowed() as tree:
                started = time.monotonic()
                verdict = tree.judge(mutant)
            with lock:
                kept[keys[mutant.name]] = verdict
                file.write_text(json.dumps(kept, indent=1))
                progress.console.print(f"{verdict:16} {time.monotonic() - started:5.0f} s  {mutant.name}")
                progress.advance(task)

        list(pool.map(judge, waiting))
    return {m.name: kept[keys[m.name]] for m in mutants}


def report(mutants: list[Mutant], verdicts: dict[str, str], known: dict[str, str]) -> int:
    """Print survivors with their reasons, and the share that was caught."""
    survived = [m.name for m in mutants if verdicts[m.name] == "survived"]
    broken = [m.name for m in mutants if verdicts[m.name] == "does not compile"]
    for name in survived:
        print(f"survived  {name}: {known.get(name, 'NOT EXPLAINED in tests/mutants/survivors.toml')}")
    for name in broken:
        print(f"does not compile  {name}: mend tests/mutants/patches.toml")
    equal = [name for name in survived if known.get(name, "").startswith("equivalent")]
    counted = len(mutants) - len(equal) - len(broken)
    caught = counted - (len(survived) - len(equal))
    share = caught / counted if counted else 1.0
    print(f"{caught} of {counted} faults that change behaviour are caught ({share:.1%}); {len(equal)} change nothing")
    return int(share < WANTED or bool(broken) or any(name not in known for name in survived))


if __name__ == "__main__":
    sys.exit(main())
