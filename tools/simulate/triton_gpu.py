"""Launches of Triton kernels, sent to the simulator: ours by the public functions, rivals' by their own launchers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from specdec_kernels import _backends

from ..gpu_model.triton_run import Launch, recorded, resources, tensors
from .gpgpusim import Run, Simulator
from .memory import Watch

TARGET = "cuda:80"


@contextmanager
def simulated(gpu: Simulator, timed: bool = False) -> Iterator[list[Run]]:
    """Inside, `backend="triton"` takes CPU tensors, and every Triton kernel runs in the simulator."""
    runs: list[Run] = []
    loaded: dict[str, str] = {}
    watch = Watch()

    def execute(launch: Launch, given: dict[str, Any]) -> None:
        if launch.blocks == 0:
            return
        compiled = launch.compiled
        name = loaded.get(compiled.hash)
        if name is None:
            name = loaded[compiled.hash] = f"{compiled.name}_{len(gpu.parameters)}"
            used = resources(compiled, TARGET)
            text = compiled.asm["ptx"].replace(compiled.name, name)
            gpu.load(text, {name: (used.registers, 0, used.spilled)}, timed)
        arguments = [part for key, kind in compiled.src.signature.items() for part in _packed(given.get(key), kind)]
        arguments += [bytes(p.size) for p in gpu.parameters[name][len(arguments) :]]  # scratch that it does not use
        gpu.memory(watch.ranges(tensors(tuple(given.values()))))
        shared = compiled.metadata.shared
        runs.append(gpu.launch(name, launch.grid, launch.threads, arguments, shared, timed))

    refusal = _backends._refusal  # of CPU tensors: here they are what the simulated GPU sees
    taken = lambda backend, kind: None if backend == "triton" else refusal(backend, kind)  # noqa: E731
    with mock.patch.object(_backends, "_refusal", taken), recorded(TARGET, then=execute), watch:
        yield runs


def _packed(value: Any, kind: Any) -> list[bytes]:
    """Bytes of an argument; none of a constant, several of a structure."""
    if isinstance(kind, tuple):
        return [part for v, k in zip(value, kind, strict=True) for part in _packed(v, k)]
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [(value.data_ptr() if isinstance(value, torch.Tensor) else int(value)).to_bytes(8, "little")]
    if kind.startswith("fp"):
        return [struct.pack({"fp32": "<f", "fp64": "<d"}[kind], value)]
    bits = int(kind[1:])
    return [(int(value) & ((1 << bits) - 1)).to_bytes(max(bits // 8, 1), "little")]
