"""Triton's interpreter, many times faster, with the same results: what it repeats for every operation is done once."""

from __future__ import annotations

import dataclasses
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


class _Types:
    """What the types of blocks and the tensors of a type say of themselves, made once for each element and shape."""

    def __init__(self, block: Any, tensor: Any) -> None:
        self.make_block, self.make_tensor = block.__init__, tensor.__init__
        self.known: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.shapes: dict[tuple[Any, ...], Any] = {}

    def block(self, made: Any, element: Any, shape: Any) -> None:
        """`block_type.__init__`. Equal shapes are one object."""
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = (element.name, getattr(element, "address_space", None), sizes)
        fields = self.known.get(key)
        if fields is None:
            self.make_block(made, element, shape)
            made.shape = self.shapes.setdefault(sizes, made.shape)
            made.fields_of_tensors = {}
            self.known[key] = fields = vars(made)
        vars(made).update(fields)

    def tensor(self, made: Any, handle: Any, type: Any) -> None:
        """`tensor.__init__`."""
        fields = vars(type).setdefault("fields_of_tensors", {})
        if not fields:
            self.make_tensor(made, handle, type)
            fields.update(vars(made))
        vars(made).update(fields)
        made.handle, made.type = handle, type


def patch_once() -> None:
    """Replace `triton.language` once for each function, make types once, reduce by halves, drop unread checks."""
    try:
        import triton.language as tl
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

    types = _Types(tl.block_type, tl.tensor)
    tl.block_type.__init__ = lambda self, element_ty, shape: types.block(self, element_ty, shape)
    tl.tensor.__init__ = lambda self, handle, type: types.tensor(self, handle, type)

    semantic = interpreter.interpreter_semantic
    broadcast, cast = semantic.broadcast_impl_value, semantic.cast

    def broadcast_others(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None):
            return lhs, rhs
        both: tuple[Any, Any] = broadcast(lhs, rhs)
        return both

    def cast_others(x: Any, to: Any, *rounding: Any) -> Any:
        return x if x.dtype is to else cast(x, to, *rounding)

    semantic.broadcast_impl_value, semantic.cast = broadcast_others, cast_others
    # Without debug an overflow is computed in 64 bits, compared, and not reported: a quarter of the time.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
