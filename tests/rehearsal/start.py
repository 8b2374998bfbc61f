"""The Python of a rehearsal (rehearse.py): what bench/gpu.sh starts, on GPUs that are none. In the copied tree only.

Sizes are cut down, and what can go wrong on a GPU happens once: a rival that fails, a capture that fails, a profiler
that does not run. `start.py -m MODULE ...`, `start.py -c CODE`, `start.py - < CODE` and `start.py setup.py ...`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = ("bench.gpu_file", "zipfile")
TINY = 600  # ids: one tile, and not all of it
SMALL = {"vocab": TINY, "batch": 2, "nodes": 8, "past": 20, "draft": 2, "compiled": False}
entered = contextlib.ExitStack()


def enter() -> None:
    """Two GPUs for the rest of this process."""
    sys.path[0:0] = [str(ROOT / "tests"), str(ROOT), str(ROOT / "python")]
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter
    import torch
    from fake_gpu import fake_gpu
    from native.build import load_backend

    from specdec_kernels import _native

    if _native.test_backends:  # pytest's conftest, in a process that start.py began
        return
    torch.set_num_threads(1)
    interpreter.patch_once()
    (library,) = (ROOT / "build/cuda_host").glob("*.so")
    load_backend(library)
    entered.enter_context(fake_gpu())


def small(case: Any) -> Any:
    """The same case on small inputs; a format that names its past keeps it."""
    given = {f.name for f in dataclasses.fields(case)} & SMALL.keys()
    return dataclasses.replace(case, **{name: SMALL[name] for name in given})


def smaller(module: Any, name: str) -> None:
    """Make a function return small cases."""
    whole = getattr(module, name)
    setattr(module, name, lambda *args: [small(case) for case in whole(*args)])


class Profile:
    """torch.profiler.profile: one kernel the first time, an error the second."""

    runs = 0

    def __init__(self, **options: Any) -> None:
        Profile.runs += 1

    def __enter__(self) -> Profile:
        if Profile.runs == 2:
            raise RuntimeError("planned: no profiler")
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def key_averages(self) -> list[Any]:
        """Of one kernel."""
        return [SimpleNamespace(key="rows_kernel", self_device_time_total=7.0, count=4)]


def plan_failures() -> None:
    """What one run on a GPU may meet, and small cases."""
    import fake_gpu
    import torch

    from bench import cases, gpu_clock, gpu_plan, rows, suite, tree_from_sequences
    from bench.rivals import eager, lazy

    cases.MODELS[TINY], rows.TRIED_SEEDS = "tiny", 2
    smaller(gpu_plan, "cases")
    smaller(gpu_plan, "counted")
    gpu_clock.REPLAYS, gpu_clock.FEWEST, gpu_clock.COPY_BYTES, gpu_clock.PHILOX_BLOCKS = 2, 1, 1 << 20, 1 << 11
    torch.profiler.profile = Profile  # type: ignore[assignment, misc]
    served = []

    def backends() -> list[str]:  # the interpreter takes its time
        served.append(0)
        return ["cuda", "triton"] if len(served) < 2 else ["cuda"]

    suite.backends = backends
    verify = eager.verify_chain

    def uncapturable(*args: Any) -> Any:
        if fake_gpu.STATE.capturing is not None:
            raise RuntimeError("planned: not permitted in a capture")
        return verify(*args)

    def broken(*args: Any) -> Any:
        raise RuntimeError("planned: this does not run")

    eager.verify_chain, lazy.verify_chain, tree_from_sequences.inputs = uncapturable, broken, broken


def main() -> None:
    """Run what the arguments name."""
    kind, *rest = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    if kind == "setup.py":
        print("a rehearsal builds nothing")
    elif kind == "-m":
        if rest[0] not in WITHOUT_TORCH:
            enter()
        if rest[0] in ("bench.gpu", "bench.gpu_counters"):
            plan_failures()
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        enter()
        code = rest[0] if kind == "-c" else sys.stdin.read()
        exec(compile(code, kind, "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
