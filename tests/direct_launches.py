"""Prints, as JSON, where a launch past `JITFunction.run` is another than `run`'s: in a process of its own.

A stand-in for the driver poses as the GPU. A compiled kernel is the key that Triton gives it, and notes what it gets.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import warm_keys
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specdec_kernels import _backends, use_backend
from specdec_kernels._triton import direct
from specdec_kernels._triton import launch as host
from tools.gpu_model.triton_run import TARGETS, _Driver

noted: list[tuple[Any, ...]] = []  # (made by `run`, kernel and device, grid, stream, arguments) of each launch


class Gpu(_Driver):
    """A driver of which tests set the current device and stream."""

    stream = 7

    def get_current_stream(self, device: int | None = None) -> int:
        return self.stream


class Compiled(CompiledKernel):  # type: ignore[misc]
    """What Triton would have compiled."""

    def __init__(self, key: Any, signature: dict[str, Any]) -> None:
        self.function, self.packed_metadata, self.signature = key, ("metadata", key), signature
        self._run = self.launched

    def launch_metadata(self, grid: Any, stream: int, *args: Any) -> None:
        """None is asked for."""

    def launched(self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *rest: Any) -> None:
        """As the launchers of Triton: constants are skipped, a pointer is a tensor or an address."""
        _, enter, _, *args = rest
        assert (function, metadata) == (self.function, self.packed_metadata)
        noted.append((enter is not None, function, (x, y, z), stream, flat(args, tuple(self.signature.values()))))


def flat(args: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a GPU gets of nested arguments."""
    found: list[Any] = []
    assert len(args) == len(kinds)
    for x, kind in zip(args, kinds, strict=True):
        if isinstance(kind, tuple):
            assert isinstance(x, tuple)
            found += flat(x, kind)
        elif kind != "constexpr":
            found.append(x.data_ptr() if hasattr(x, "data_ptr") else x)
            assert (type(found[-1]) is int) == (kind[0] in "*iu" and kind != "u1")
    return tuple(found)


def compiled(self: Any, key: Any, signature: Any, device: int, *_: object) -> Compiled:
    """In place of `JITFunction._do_compile`."""
    made = Compiled((self.__name__, device, str(key)), signature)
    self.device_caches[device][0][key] = made
    return made


class Pair(NamedTuple):
    x: Any
    n: Any
    inner: Any = None


class Other(NamedTuple):
    x: Any
    n: Any
    inner: Any = None


@triton.jit
def plain_kernel(x, pair, n, m, FLAG: triton.language.constexpr):
    pass


@host.entry
def entry_kernel(x, pair, n, m, FLAG: triton.language.constexpr):
    pass


X = torch.zeros(64)
TENSORS = (X, X[1:], X[4:], X[:0], X.int(), X.bfloat16(), X.bfloat16()[1:], X.bool())
INTS = (0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40 + 1, 2**63 - 1, 2**63, 2**63 + 1)
VALUES = (*TENSORS, *INTS, None, 0.0, 1.0, True, False)
NESTED = [Pair(*p) for p in itertools.product((None, X, X[1:], 1, 2), (None, X.int(), 16, 1.0))]
NESTED += [Pair(x, 3, inner) for x, inner in itertools.product((X, None), (Pair(X, 1), Pair(X[1:], 1), Other(X, 1)))]
NESTED += [Pair(X, 3, Pair(X, 2, Pair(None, 2**33))), Other(X, 1), Pair(X, (X, 3)), Pair((X,), 3), ()]


def calls() -> Iterator[tuple[Any, int, tuple[Any, ...], dict[str, Any]]]:
    """Launches of the two small kernels: every value in every place, constants, options, grids."""
    usual = (X, Pair(X, 2), 2, 2)
    for kernel in (plain_kernel, entry_kernel):
        for value in VALUES:
            yield kernel, 3, (value, *usual[1:]), {"FLAG": 1}
            yield kernel, 3, (X, Pair(value, 2), 2, value), {"FLAG": 1}
            yield kernel, 3, (X, Pair(X, value), value, 2), {"FLAG": 1}
        for record in NESTED:
            yield kernel, 3, (X, record, 2, 2), {"FLAG": 1}
        for options in ({"FLAG": 2}, {"FLAG": False}, {"FLAG": 1, "num_warps": 1}, {"FLAG": 1, "registers": 32}):
            yield kernel, 70_000, usual, options


def both(launch: Any, kernel: Any, programs: int, args: Any, options: Any) -> tuple[Any, Any]:
    """(what `launch` led to, what `run` makes of the same)."""
    noted.clear()
    launch()
    (got,) = noted
    noted.clear()
    kernel[(programs,)](*args, **options)
    (want,) = noted
    return got, want


def compare(lines: list[Any], direct_only: bool) -> Any:
    """A `direct.prepare` whose launches are also made by `run`; differences are appended."""
    prepare = direct.prepare

    def prepared(kernel: Any, programs: int, args: Any, options: Any, seen: Any = None) -> Any:
        launch = prepare(kernel, programs, args, options, seen)

        def launched() -> None:
            got, want = both(launch, kernel, programs, args, options)
            if got[1:] != want[1:]:
                lines.append([str(got), str(want)])
            if direct_only and got[0]:
                lines.append([kernel.__name__, "was launched by run"])

        return launched

    return mock.patch.object(direct, "prepare", prepared)


def small(gpu: Gpu) -> list[Any]:
    """Every small launch, twice on each of two devices and streams; then together, when all are known."""
    faults: list[Any] = []
    every = list(calls()) * 2
    for again, (device, stream) in itertools.product((False, True), ((gpu.device, 7), (gpu.device + 100, 8))):
        gpu.device, gpu.stream = device, stream
        random.Random(0).shuffle(every)
        together = host.Launches({})
        with compare(faults, again):
            for kernel, programs, args, options in every:
                if again:
                    together.add(kernel, programs, *args, **options)
                else:
                    host.launch(kernel, programs, *args, **options)
            together()
    return faults


def watched() -> dict[str, bool]:
    """Whether a launch that is known goes through `run` in these cases."""
    args, options = (X, Pair(X, 2), 2, 2), {"FLAG": 1}

    def is_by_run(*args: Any, **options: Any) -> bool:
        noted.clear()
        host.launch(plain_kernel, 2, *args, **options)
        return bool(noted[-1][0])

    def hook(*_: object, **__: object) -> None: ...

    run = JITFunction.run
    found = {"nothing": is_by_run(*args, **options)}
    with contextlib.ExitStack() as stack:
        knobs.runtime.launch_enter_hook.add(hook)
        stack.callback(knobs.runtime.launch_enter_hook.remove, hook)
        found["a hook of launches"] = is_by_run(*args, **options)
    with mock.patch.object(JITFunction, "run", lambda *a, **k: run(*a, **k)):
        found["another run"] = is_by_run(*args, **options)
    with mock.patch.object(plain_kernel, "pre_run_hooks", [hook]):
        found["a hook of run"] = is_by_run(*args, **options)
    with mock.patch.object(knobs.runtime, "add_stages_inspection_hook", return_value=("", "0"), create=True):
        found["a hook of the compiler"] = is_by_run(*args, **options)
    with mock.patch.object(knobs.runtime, "debug", True):
        found["debugging, first"] = is_by_run(*args, **options)
        found["debugging, then"] = is_by_run(*args, **options)
    found["a number by name"] = [is_by_run(*args[:3], **options, m=2) for _ in range(2)][1]
    found["a constant by place"] = [is_by_run(*args, 1) for _ in range(2)][1]
    wrapped = triton.reinterpret(X, triton.language.int32)
    found["what is no tensor"] = [is_by_run(wrapped, *args[1:], **options) for _ in range(2)][1]
    driver.set_active(Gpu(TARGETS["hip:gfx942"]))
    found["AMD"] = [is_by_run(*args, **options) for _ in range(2)][1]
    return found


def main() -> None:
    """Lines of [case, differences]; the last one of `watched`."""
    gpu = Gpu(TARGETS["cuda:90"])
    driver.set_active(gpu)
    no_refusal = mock.patch.object(_backends, "_refusal", return_value=None)
    with mock.patch.object(JITFunction, "_do_compile", compiled), no_refusal, use_backend("triton"):
        print(json.dumps(["small kernels", small(gpu)]), flush=True)
        for name, (_, made) in warm_keys.CASES.items():
            faults: list[Any] = []
            some = list(itertools.islice(made(5003), 0, None, 5))
            for call in some:
                call()
            with compare(faults, True):
                for call in some:
                    call()
            print(json.dumps([name, faults]), flush=True)
        print(json.dumps(["watched", watched()]))


if __name__ == "__main__":
    main()
