"""What a call of an op may touch: its arguments, its results, and the scratch that its launcher allocates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Range = tuple[int, int]
KEYS = {"triton": torch._C.DispatchKey.CompositeExplicitAutograd, "cuda_host": torch._C.DispatchKey.CPU}


def extent(tensor: Tensor) -> Range:
    """First byte of a tensor, and the bytes from it to its last element's end."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


class Watch(TorchDispatchMode):
    """Knows the tensors of the running call; scratch starts as bytes of 0xff, so that reading it unwritten shows."""

    def __init__(self) -> None:
        super().__init__()
        self._call: list[Tensor] = []
        self._zeros: list[Tensor] = []  # tickets outlive a call
        self._inside = False

    def ranges(self, more: Iterable[Tensor] = ()) -> list[Range]:
        """What a launch may touch now."""
        return [extent(t) for t in (*self._call, *self._zeros, *more)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, overload = func.__name__.partition(".")
        if not self._inside and name.endswith("_out") and func.namespace == "specdec_kernels" and overload in KEYS:
            return self._run(func, KEYS[overload], args)
        result = func(*args, **(kwargs or {}))
        if self._inside and isinstance(result, Tensor) and result.device.type == "cpu":
            if "empty" in name and result.numel() > 0:
                result.untyped_storage().fill_(0xFF)  # type: ignore[attr-defined]
            (self._zeros if "zeros" in name else self._call).append(result)
        return result

    def _run(self, func: Any, key: Any, args: tuple[Any, ...]) -> Any:
        """The op below the dispatcher's Python layer, so that what it allocates comes by here too."""
        flat = [part for arg in args for part in (arg if isinstance(arg, list) else [arg])]
        self._call, self._inside = [part for part in flat if isinstance(part, Tensor)], True
        try:
            with self:
                return func._op_dk(key, *args)
        finally:
            self._call, self._inside = [], False
