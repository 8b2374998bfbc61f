"""Launches of kernels that were compiled before, past `JITFunction.run`, whose Python takes 30 us for our records.

`run` asks of each tensor and number what it means to the compiler, writes the options into a text, and compares each
constant of the source with its old value. Here one pass makes of the arguments a key and what the GPU gets, and the
compiled kernel of that key is launched as `run` launches it. `run` itself makes the first launch for a key, and all
launches on AMD (its compiler looks at more of a tensor), under the interpreter, by a Triton without the names used here
(3.6 and 3.7 have them), and while somebody watches: hooks of launches or of the compiler, another `run`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

INT32 = 1 << 31
Key = tuple[Any, ...]
Seen = dict[int, tuple[Key, Key, Key]]  # by id: a record, what is noted of it, and it with addresses
_run = getattr(triton.JITFunction, "run", None)  # tools put another in its place, some before they import this file
if getattr(_run, "__module__", None) != "triton.runtime.jit":
    _run = None
_has_names = all(
    hasattr(place, name)
    for place, name in (
        (triton.compiler.CompiledKernel, "run"),
        (knobs.compilation, "instrumentation_mode"),
        (knobs.runtime, "debug"),
        (knobs.runtime, "launch_enter_hook"),
        (knobs.runtime, "launch_exit_hook"),
    )
)
# For each key: launcher of the compiled kernel, its function, its metadata, a None for each constant, and the kernel,
# whose id the key holds.
_compiled: dict[Key, tuple[Any, ...]] = {}


class _OtherKind(Exception):
    """An argument is neither tensor nor number nor record."""


@functools.cache
def is_nvidia(active: Any) -> bool:
    """Whether a driver is CUDA's."""
    return bool(active.get_current_target().backend == "cuda")


def _needs_run(kernel: Any) -> bool:
    """Whether `run` must see every launch of a kernel."""
    if not (_has_names and isinstance(kernel, triton.JITFunction) and is_nvidia(driver.active)):
        return True
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # an empty chain is no hook
            return True
    is_staged = getattr(runtime, "add_stages_inspection_hook", None) is not None
    return is_staged or bool(kernel.pre_run_hooks) or triton.JITFunction.run is not _run


def prepare(
    kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any], seen: Seen | None = None
) -> Callable[[], object]:
    """The launch of a 1-D grid on the current device and stream, to be made once or often; it keeps its tensors.

    seen: records of other launches of the same tensors, which are not looked at again.
    """

    def by_run() -> Any:
        return kernel[(programs,)](*args, **options)

    if _needs_run(kernel):
        return by_run
    active = driver.active
    device = active.get_current_device()
    noted = [id(kernel), device, knobs.runtime.debug, knobs.compilation.instrumentation_mode, *options]
    noted += options.values()
    try:
        packed = _packed(args, noted, seen)
    except _OtherKind:
        return by_run
    key = tuple(noted)
    found = _compiled.get(key)
    if found is None:

        def first() -> None:
            made, given, rest = by_run(), kernel.params[: len(args)], kernel.params[len(args) :]
            is_usual = all(p.is_constexpr for p in rest) and not any(p.is_constexpr for p in given)
            if is_usual and isinstance(made, triton.compiler.CompiledKernel):
                _compiled[key] = (made.run, made.function, made.packed_metadata, (None,) * len(rest), kernel)

        return first
    run, function, metadata, constants, _ = found
    stream = active.get_current_stream(device)

    def launch(_kept: object = args) -> None:
        run(programs, 1, 1, stream, function, metadata, None, None, None, *packed, *constants)

    return launch


def _packed(args: tuple[Any, ...], noted: list[Any], seen: Seen | None) -> tuple[Any, ...]:
    """Arguments with addresses in place of tensors; `noted` gets all of them that Triton compiles for.

    Of a tensor its dtype and whether it is aligned to 16 bytes; of an int its type, whether it is 1 and whether it is a
    multiple of 16; of a record its class, which says how many entries follow.
    """
    packed: list[Any] = []
    note, put = noted.append, packed.append
    for x in args:
        kind = type(x)
        if kind is Tensor:
            address = x.data_ptr()
            note((x.dtype,) if address & 15 else x.dtype)
            put(address)
        elif x is None:
            note(None)
            put(None)
        elif kind is int:
            if -INT32 <= x < INT32:
                note("1" if x == 1 else "n" if x & 15 else "16n")
            else:
                note((x >= 1 << 63, x & 15 == 0))
            put(x)
        elif isinstance(x, tuple):
            known = None if seen is None else seen.get(id(x))
            if known is None:
                inner = [kind]
                within = _packed(x, inner, seen)
                known = x, tuple(inner), within
                if seen is not None:
                    seen[id(x)] = known
            note(known[1])
            put(known[2])
        elif kind is float or kind is bool:
            note(kind)
            put(x)
        else:
            raise _OtherKind
    return tuple(packed)
