"""Calls that were made before are run again natively, without their checks and without torch's dispatcher.

The front of an op (the public function) checks its arguments, lays them out flat and allocates the results. All of it
follows from what is not numbers in a tensor: shapes, strides, dtypes, scalars, names. The first calls with such a key
go the long way, and the second leaves a plan in the native library (csrc/python/replay.cpp); later ones follow it.
Where something listens to the dispatcher (a compiler, a mode, a transform, a trace, a profiler) every call goes the
long way, as does one that the library cannot read: subclasses, gradients, other devices, tensors the front made itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

from . import _backends, _native
from ._cache import CacheLayout

P = ParamSpec("P")
R = TypeVar("R")

# Called without arguments; one that answers true sends calls to the dispatcher. (The transforms of torch.func show
# tensors without memory, which the library leaves to the dispatcher by itself.)
_LISTENERS = ("_len_torch_dispatch_stack", "_is_tracing")


class _Calls(threading.local):
    """What the ops of a front did while it ran: op or None, flat arguments, results."""

    made: list[tuple[str | None, tuple[Any, ...], tuple[Any, ...]]] | None = None


_calls = _Calls()
_library: Any = None  # as a Python module; False: this torch or this installation has no such thing


def library() -> Any:
    """The native library, opened by the first call; False where there is none that could replay."""
    global _library
    if _library is None:
        listeners = tuple(getattr(torch._C, name, None) for name in _LISTENERS)
        is_known = None not in listeners and hasattr(profiler, "_is_profiler_enabled")
        _library = False
        if is_known and (module := _native.cpu_module()) is not None:
            names = vars(profiler), "_is_profiler_enabled"
            _library = module.start(torch.Tensor, torch.dtype, CacheLayout, listeners, *names) and module
    return _library


def replayed(front: Callable[P, R]) -> Callable[P, R]:
    """Let calls of `front` that look like an earlier one be replayed."""
    name = front.__name__

    @functools.wraps(front)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            return front(*args, **kwargs)
        native = library() if _library is None else _library
        if native is False:
            return front(*args, **kwargs)
        answer = native.recall(name, args, kwargs, _backends._chosen)
        if answer is None:
            return _noted(native, front, args, kwargs)
        return front(*args, **kwargs) if answer is NotImplemented else answer

    return call


def _noted(native: Any, front: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    """The second call with a key: how it went is kept."""
    seen: set[int] = set()
    args, kwargs = _told_apart(args, seen), {name: _told_apart(value, seen) for name, value in kwargs.items()}
    outer, _calls.made = _calls.made, []
    chosen = _backends._chosen
    try:
        returned = front(*args, **kwargs)
        made = _calls.made
    finally:
        _calls.made = outer
    only = made[0] if len(made) == 1 else (None, (), ())
    native.record(front.__name__, args, kwargs, chosen, *only, returned)
    return returned


def _told_apart(value: Any, seen: set[int]) -> Any:
    """The same arguments, each tensor an object of its own: the plan must know which one went where."""
    if isinstance(value, torch.Tensor):
        if id(value) in seen:
            return value.detach()
        seen.add(id(value))
    elif isinstance(value, tuple):
        parts = [_told_apart(part, seen) for part in value]
        if any(part is not before for part, before in zip(parts, value, strict=True)):
            return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value


def note(op: str | None, flat: tuple[Any, ...], results: tuple[Any, ...]) -> None:
    """Called by an op that ran: its name if the native CPU library did the work, with arguments and results."""
    if not torch.compiler.is_compiling() and _calls.made is not None:
        _calls.made.append((op, flat, results))
