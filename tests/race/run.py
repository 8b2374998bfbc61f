"""Make the calls of cases.py on one library: `python -m tests.race.run clean|twins LIBRARY` prints what was found."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..native.build import load_backend
from .cases import cases
from .twins import TWINS

ROOT = Path(__file__).resolve().parents[2]


def calls(library: Path) -> Iterator[tuple[str, Any]]:
    """Names of the cases, and what a call of each does to this library."""
    load_backend(library)
    return cases()


def race_of(case: Any) -> str | None:
    """The report of a call's first race, or None."""
    try:
        case()
    except RuntimeError as error:
        if "data race" not in str(error):
            raise
        return str(error)
    return None


def kernels_of(library: Path) -> dict[str, int]:
    """Address of every kernel in a library, by its name with template arguments."""
    source = "".join(path.read_text() for path in sorted((ROOT / "csrc/cuda").glob("*.cu*")))
    names = set(re.findall(r"__global__[^{;]*?(\w+)\(const __grid_constant__", source))
    listed = subprocess.run(["nm", "-C", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in listed.splitlines():
        address, kind, symbol = line.split(maxsplit=2)
        name = re.search(r"(\w+_kernel)(<.*?>)?\(", symbol)
        if kind in "tTwW" and "{lambda" not in symbol and name and name[1] in names:
            found[name[1] + (name[2] or "")] = int(address, 16)
    unseen = names - {name.split("<")[0] for name in found}
    return found | dict.fromkeys(unseen, -1)


def entered(library: Path) -> list[int]:
    """An address inside every function that a kernel has called, and in the kernels themselves."""
    offsets = (ctypes.c_size_t * 100_000)()
    count = ctypes.CDLL(str(library)).race_entered(offsets, len(offsets))
    assert count < len(offsets)
    return list(offsets[:count])


def not_run(library: Path, places: set[int]) -> list[str]:
    """Kernels that hold none of these places."""
    listed = subprocess.run(["nm", "-n", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    starts = [int(line.split()[0], 16) for line in listed.splitlines() if line.split()[1] in "tTwW"]
    missing = []
    for name, start in kernels_of(library).items():
        end = min((other for other in starts if other > start), default=start + 1)
        if not any(start <= place < end for place in places):
            missing.append(name)
    return sorted(missing)


def apart(make: Callable[[], Any]) -> Any:
    """What a function returns in a process of its own: a kernel that has raced is left as it is, with its tickets."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            with os.fdopen(write, "w") as pipe:
                json.dump(make(), pipe)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError("a call has ended its process")
    return json.loads(text)


def run_clean(library: Path) -> dict[str, Any]:
    """All calls on the sources as they are."""
    start, races, places = time.perf_counter(), {}, set()
    names = []
    for name, case in calls(library):
        race, found = apart(lambda case=case: (race_of(case), entered(library)))  # type: ignore[misc]
        names.append(name)
        places.update(found)
        if race is not None:
            races[name] = race
    return {
        "calls": len(names),
        "kernels": len(kernels_of(library)),
        "missing": not_run(library, places),
        "races": races,
        "seconds": time.perf_counter() - start,
    }


def run_twins(library: Path) -> dict[str, Any]:
    """Calls under each fault until one reports it; then those that did, without."""
    start = time.perf_counter()
    made = dict(calls(library))
    at_work = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "race_twin")

    def verdict(number: int, wanted: str) -> tuple[str, str] | None:
        at_work.value = number
        for name in (name for name in made if name.startswith(wanted)):
            if (race := race_of(made[name])) is not None:
                return name, race
        return None

    verdicts = [apart(lambda n=n, t=t: verdict(n, t.cases)) for n, t in enumerate(TWINS, 1)]  # type: ignore[misc]
    seen = {one[0] for one in verdicts if one is not None}
    silent = {name: apart(lambda name=name: race_of(made[name])) for name in sorted(seen)}  # type: ignore[misc]
    return {
        "verdicts": [None if one is None else one[1] for one in verdicts],
        "races": {name: race for name, race in silent.items() if race is not None},
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process with threads does not fork well
    kind, library = sys.argv[1:]
    print(json.dumps({"clean": run_clean, "twins": run_twins}[kind](Path(library))))
