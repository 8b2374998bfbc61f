"""Counts the bytes an op moves through memory, without a GPU. Three meters, one unit: bytes read and bytes written.

* `TritonMeter`: every load and store of a kernel in Triton's interpreter; a masked lane costs nothing. Blocks of
  torch operators around the kernels are counted by `TorchMeter`.
* `HostMeter`: the CUDA sources, compiled for the host, count in the accessor that is their only way to global memory.
* `TorchMeter`: every aten operator reads its tensor inputs and writes its outputs once, whatever it does inside (a
  sort or a softmax that reads twice is charged once: a lower bound, in the rival's favour). Views and allocations are
  free, a gather or an index costs what it picks, a fill costs its output. No meter sees caches: bytes that are read
  twice are counted twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec_kernels._op import OPS

FREE = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_", "detach", "lift_fresh",
)  # fmt: skip
PICKING = ("gather", "index", "index_select", "embedding", "take", "_unsafe_index")
PLACING = ("index_put_", "_index_put_impl_", "index_copy_", "scatter_")  # their last tensor goes to some places
OVERWRITING = ("copy_", "fill_", "zero_", "exponential_", "uniform_", "random_", "normal_", "bernoulli_")


class Bytes:
    """A running total."""

    def __init__(self) -> None:
        self.read = 0
        self.written = 0

    @property
    def total(self) -> int:
        """Both directions."""
        return self.read + self.written


def size(tensor: Tensor) -> int:
    """Bytes of a tensor that can be told apart: an expanded dimension costs once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else min(length, 1)
    return count * tensor.element_size()


class TorchMeter(TorchDispatchMode):
    """Adds the traffic of every aten operator to `bytes`."""

    def __init__(self, bytes_: Bytes) -> None:
        super().__init__()
        self.bytes = bytes_
        self.paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "specdec_kernels":
            self.inside(func, args)
            return None
        result = func(*args, **kwargs)
        if not self.paused:
            self.count(func, [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)], result)
        return result

    def inside(self, func: Any, args: Any) -> None:
        """Our Triton operator, run outside the dispatcher: what it calls is what counts."""
        name, overload = func._schema.name.split("::")[-1], func._overloadname
        assert overload == "triton" and name.endswith("_out"), f"the meter does not see inside {func}"
        with self:
            OPS[name.removesuffix("_out")]._triton_out(*args)

    def count(self, func: Any, inputs: list[Tensor], result: Any) -> None:
        """One operator."""
        name = func._schema.name.split("::")[-1]
        outputs = [r for r in tree_leaves(result) if isinstance(r, Tensor)]
        if name in FREE or getattr(func, "is_view", False):
            return
        storages = {t.untyped_storage().data_ptr() for t in inputs}
        if not func._schema.is_mutable and outputs and all(o.untyped_storage().data_ptr() in storages for o in outputs):
            return  # a view under another name (reshape, contiguous of a contiguous tensor)
        written = size(inputs[-1]) if name in PLACING else sum(map(size, outputs))
        self.bytes.written += written
        if name in PICKING:
            self.bytes.read += written + sum(map(size, inputs[1:]))
        elif name in (*OVERWRITING, *PLACING):
            self.bytes.read += sum(map(size, inputs[1:]))
        else:
            self.bytes.read += sum(size(t) for t in {id(t): t for t in inputs}.values())


@contextlib.contextmanager
def triton_meter() -> Iterator[Bytes]:
    """Count loads, stores and atomics of interpreted Triton kernels, and the torch operators around them."""
    from triton.runtime import interpreter

    total = Bytes()
    torch_meter = TorchMeter(total)
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    kept = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_atomic_rmw,
        builder.create_atomic_cas,
        executor.__call__,
    )

    def lanes(mask: Any, pointers: Any) -> int:
        return int(mask.data.sum()) if mask is not None else int(pointers.data.size)

    def width(pointers: Any) -> int:
        return int(pointers.get_element_ty().primitive_bitwidth) // 8

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        total.read += lanes(mask, pointers) * width(pointers)
        return kept[0](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        total.written += lanes(mask, pointers) * width(pointers)
        return kept[1](self, pointers, value, mask, *rest)

    def atomic_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        total.written += lanes(mask, pointers) * width(pointers)  # no kernel asks what stood there
        return kept[2](self, operation, pointers, value, mask, *rest)

    def atomic_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        moved = lanes(None, pointers) * width(pointers)
        total.read += moved
        total.written += moved
        return kept[3](self, pointers, *rest)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch_meter.paused += 1  # the interpreter's own copies to numpy are no traffic
        try:
            return kept[4](self, *args, **kwargs)
        finally:
            torch_meter.paused -= 1

    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    for name, replacement in zip(names, (load, store, atomic_rmw, atomic_cas), strict=True):
        setattr(builder, name, replacement)
    executor.__call__ = launch
    try:
        with torch_meter:
            yield total
    finally:
        for name, original in zip(names, kept, strict=False):
            setattr(builder, name, original)
        executor.__call__ = kept[4]


@contextlib.contextmanager
def torch_only_meter() -> Iterator[Bytes]:
    """Count the aten operators of plain PyTorch."""
    total = Bytes()
    with TorchMeter(total):
        yield total


@contextlib.contextmanager
def host_meter() -> Iterator[Bytes]:
    """Count in the accessor of the CUDA sources that run on the host."""
    total = Bytes()
    counted = torch.ops.specdec_kernels.cuda_host_traffic  # (read, written) since its last call
    counted()
    yield total
    total.read, total.written = counted()
