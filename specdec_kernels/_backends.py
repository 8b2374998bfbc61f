"""Which backend runs a call, and why another one cannot."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from . import _native

PREFERENCE = {"cuda": ("cuda", "triton", "reference"), "cpu": ("cpu", "reference")}
BACKENDS = ("reference", "cpu", "triton", "cuda")
P = ParamSpec("P")
R = TypeVar("R")


class _Choice:
    """A backend, or None for the default; each is equal to itself alone."""

    def __init__(self, backend: str | None) -> None:
        self.backend = backend


def _named_by_environment() -> str | None:
    named = os.environ.get("SPECDEC_BACKEND") or None
    if named is not None and named not in BACKENDS:
        raise ValueError(f"SPECDEC_BACKEND must be one of {', '.join(BACKENDS)}, got {named!r}")
    return named


# The choices in force, the last one counts; blocks of several threads end in any order. torch.compile guards on what is
# read of it, and recompiles when that changes.
_choices = [_Choice(_named_by_environment())]


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every op inside the block on `backend`, in all threads; an explicit choice never falls back.

    Example:
        >>> from specdec_kernels import use_backend
        >>> with use_backend("reference"):
        ...     pass
    """
    if backend not in BACKENDS and backend not in _native.test_backends:
        raise ValueError(f"use_backend: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    choice = _Choice(backend)
    _choices.append(choice)
    try:
        yield
    finally:
        _choices.remove(choice)


def available_backends(device: torch.device | str | None = None) -> dict[str, str | None]:
    """Each backend with None if it can run here, else the reason why not.

    Args:
        device: judge for tensors of this device; by default for the best device of this machine.
    """
    kind = torch.device(device).type if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    return {backend: _refusal(backend, kind) for backend in BACKENDS}


@functools.cache
def _triton_reason() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    return None


def _refusal(backend: str, kind: str) -> str | None:
    """Why `backend` cannot take tensors of device type `kind`, or None."""
    if backend == "reference":
        return None
    if backend == "cpu":
        return f"takes cpu tensors, got {kind}" if kind != "cpu" else _native.cpu_reason()
    if backend == "triton":
        if kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"takes cuda tensors, got {kind} (TRITON_INTERPRET=1 runs it, slowly, on cpu tensors)"
        return _triton_reason()
    if backend == "cuda":
        return f"takes cuda tensors, got {kind}" if kind != "cuda" else _native.cuda_reason()
    return f"takes cpu tensors, got {kind}" if kind != "cpu" else None


def _constant_when_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile call `function` while tracing instead of looking inside.

    The same mark as torch.compiler.assume_constant_result, whose call would import the compiler (1.3 s).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def named(backend: str | None) -> str | None:
    """The backend of one call that somebody named: argument, `use_backend` or SPECDEC_BACKEND."""
    return backend or _choices[-1].backend


def choose(op: str, declared: tuple[str, ...], device: torch.device, backend: str | None) -> str:
    """Backend of one call: the one that is named, or the first of the device's list that runs."""
    explicit = named(backend)
    if explicit is None:
        return _default(op, declared, device)
    return _explicit(op, declared, device.type, explicit)


@_constant_when_traced
def _explicit(op: str, declared: tuple[str, ...], kind: str, explicit: str) -> str:
    """`explicit`, or an error that lists each backend with its reason."""
    if explicit != "reference" and explicit not in declared:
        raise ValueError(f"{op}: backend must be one of reference, {', '.join(declared)}, got {explicit!r}")
    reason = _refusal(explicit, kind)
    if reason is None:
        return explicit
    others = "; ".join(f"{b}: {_refusal(b, kind) or 'available'}" for b in BACKENDS if b != explicit)
    raise RuntimeError(f"{op}: backend {explicit!r} cannot run: {reason}. Others: {others}")


@_constant_when_traced
def _default(op: str, declared: tuple[str, ...], device: torch.device) -> str:
    return _first_that_runs(op, declared, device)  # a call apart: the compiler looks inside a cache, marked or not


@functools.cache
def _first_that_runs(op: str, declared: tuple[str, ...], device: torch.device) -> str:
    kind = device.type  # by a cache of devices, since each look at it makes a string (0.2 us)
    reasons: dict[str, str] = {}
    for backend in PREFERENCE.get(kind, ("reference",)):
        reason = _refusal(backend, kind) if backend in ("reference", *declared) else "not declared for this op"
        if reason is None:
            if backend == "reference" and reasons:
                why = "; ".join(f"{b}: {r}" for b, r in reasons.items())
                warnings.warn(f"{op}: running the slow PyTorch reference on {kind} ({why})", stacklevel=5)
            return backend
        reasons[backend] = reason
    raise AssertionError("reference runs everywhere")
