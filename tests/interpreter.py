"""Triton's interpreter, many times faster, with the same results: what it repeats for every operation is done once."""

from __future__ import annotations

import functools
from typing import Any


class _Kept:
    """A replacement that stays: no test of this process compiles for a GPU."""

    def restore(self) -> None:
        """Nothing is undone."""


class _Lookup:
    """numpy's dtype of each of Triton's, by the name of its element."""

    def __init__(self, look_up: Any) -> None:
        self.look_up = look_up
        self.known: dict[str, Any] = {}

    def of(self, dtype: Any) -> Any:
        """The interpreter makes the whole table anew at each call."""
        name = dtype.scalar.name
        if name not in self.known:
            self.known[name] = self.look_up(dtype.scalar)
        return self.known[name]


def _reduce_by_halves(self: Any, input: tuple[Any, ...]) -> list[Any]:
    """A reduction without a function of numpy's own: neighbours are combined, whole blocks at a time.

    The interpreter goes through the elements one by one. `tl.sort` alone does so thousands of times a tile.
    """
    import numpy as np

    parts, axis = self.unravel(input, self.axis)
    types = [x.dtype for x in parts]
    data = [np.moveaxis(x.handle.data, axis, -1) for x in parts]
    while (size := data[0].shape[-1]) > 1:
        assert size % 2 == 0, "blocks are powers of two"
        halves = [self.to_tensor(d[..., side::2], t) for side in (0, 1) for d, t in zip(data, types, strict=True)]
        combined = self.combine_fn.fn(*halves)
        data = [x.handle.data for x in (combined if isinstance(combined, tuple) else (combined,))]
    if self.keep_dims:
        rank = input[0].handle.data.ndim
        results = [np.moveaxis(d, -1, axis) if self.axis is not None else d.reshape((1,) * rank) for d in data]
    else:
        results = [d[..., 0] for d in data]
    return [self.to_tensor(d if d.ndim else d.item(), t) for d, t in zip(results, types, strict=True)]


def patch_once() -> None:
    """Replace `triton.language` once for each function, look a dtype up once, reduce by halves."""
    try:
        from triton.runtime import interpreter
    except ImportError:  # no triton, no interpreter
        return

    patch = interpreter._patch_lang

    @functools.cache
    def once(function: Any) -> _Kept:
        patch(function)
        return _Kept()

    interpreter._patch_lang = once
    interpreter._get_np_dtype = _Lookup(interpreter._get_np_dtype).of
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves
