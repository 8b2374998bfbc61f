"""Which backend runs a call, and why another one cannot."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence

import torch

from . import _native

PREFERENCE = {"cuda": ("cuda", "triton", "reference"), "cpu": ("cpu", "reference")}
BACKENDS = ("reference", "cpu", "triton", "cuda")

_chosen: contextvars.ContextVar[str | None] = contextvars.ContextVar("specdec_backend", default=None)


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every op inside the block on `backend`; an explicit choice never falls back.

    Example:
        >>> from specdec_kernels import use_backend
        >>> with use_backend("reference"):
        ...     pass
    """
    if backend not in BACKENDS and backend not in _native.test_backends():
        raise ValueError(f"use_backend: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    token = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(token)


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


def choose(op: str, declared: Sequence[str], device: torch.device, backend: str | None) -> str:
    """Backend of one call: argument, `use_backend`, SPECDEC_BACKEND, or the first of the device's list that runs."""
    explicit = backend or _chosen.get() or os.environ.get("SPECDEC_BACKEND")
    if explicit is not None:
        if explicit != "reference" and explicit not in declared:
            raise ValueError(f"{op}: backend must be one of reference, {', '.join(declared)}, got {explicit!r}")
        reason = _refusal(explicit, device.type)
        if reason is None:
            return explicit
        others = "; ".join(f"{b}: {_refusal(b, device.type) or 'available'}" for b in BACKENDS if b != explicit)
        raise RuntimeError(f"{op}: backend {explicit!r} cannot run: {reason}. Others: {others}")
    return _default(op, tuple(declared), device.type)


@functools.cache
def _default(op: str, declared: tuple[str, ...], kind: str) -> str:
    reasons: dict[str, str] = {}
    for backend in PREFERENCE.get(kind, ("reference",)):
        reason = _refusal(backend, kind) if backend in ("reference", *declared) else "not declared for this op"
        if reason is None:
            if backend == "reference" and reasons:
                why = "; ".join(f"{b}: {r}" for b, r in reasons.items())
                warnings.warn(f"{op}: running the slow PyTorch reference on {kind} ({why})", stacklevel=4)
            return backend
        reasons[backend] = reason
    raise AssertionError("reference runs everywhere")
