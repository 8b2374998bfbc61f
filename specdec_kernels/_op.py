"""One public op, several backends: each backend is an overload of the same torch operator.

For op `f` and backend `b` two operators exist. `f_out.b` does the work and writes preallocated results; it is all
that a native library or a Triton file implements. `f.b` allocates the results and calls it; it is functional but for
the arguments it is declared to mutate, so torch.compile may move it. The reference's signature is the schema, the
shapes of the results make the fake: each is written once. In a schema a NamedTuple stands as its fields,
`draft_sampling: Sampling` as draft_temperature, draft_top_k, ...; `shapes` and native backends take these flat
arguments, the reference and Triton's launchers the structures.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from . import _backends
from ._ops import NAMESPACE, add_op_namespace_prefix, ops

_library = torch.library.Library(NAMESPACE, "DEF")
OPS: dict[str, Op] = {}

Tensors = tuple[Tensor, ...]
Results = Tensors | Tensor  # an op of one result has it bare
Shape = tuple[Sequence[int], torch.dtype]  # of a result


class Op:
    """An operator whose schema is the signature of its reference implementation, but for keyword-only parameters."""

    def __init__(
        self,
        reference: Callable[..., Any],
        shapes: Callable[..., tuple[Shape, ...]],
        *,
        results: Sequence[str],
        backends: Sequence[str] = ("cpu", "triton", "cuda"),
        mutates: Sequence[str] = (),
    ) -> None:
        """Declare `reference` as an op with these results of these `shapes`; `mutates` names what it writes."""
        self.name = reference.__name__
        self.reference = reference
        self.results = tuple(results)
        self._shapes = shapes
        self._layouts = [_layout(kind) for kind in _parameters(reference).values()]
        self._package = reference.__module__.rpartition(".")[0]
        schema = torch.library.infer_schema(_flat(reference), mutates_args=tuple(mutates))
        arguments, _, returns = schema.rpartition(" -> ")
        mutated = ", ".join(f"Tensor({chr(ord('a') + i)}!) out_{name}" for i, name in enumerate(results))
        self._schema = f"{arguments} -> {returns}"
        self._out_schema = f"{arguments[:-1]}, {mutated}) -> ()"
        self.backends: tuple[str, ...] = ()  # those declared, `reference` not counted
        self._calls: dict[str, tuple[Any, Any]] = {}
        for backend in backends:
            self.declare(backend)
        OPS[self.name] = self

    def declare(self, backend: str) -> None:
        """Define both operators of a backend (tests also declare `cuda_host`)."""
        functional, out = f"{self.name}.{backend}", f"{self.name}_out.{backend}"
        _library.define(out + self._out_schema)
        torch.library.register_fake(add_op_namespace_prefix(out), _do_nothing, lib=_library)
        if backend == "triton":
            _library.impl(out, self._triton_out, "CompositeExplicitAutograd")
        out_call = getattr(getattr(ops, f"{self.name}_out"), backend)

        def allocate(*args: Any) -> Any:
            return self._allocate(args, next(a for a in args if isinstance(a, Tensor)).device)

        def allocate_and_run(*args: Any) -> Any:
            results = allocate(*args)
            out_call(*args, *_listed(results))
            return results

        _library.define(functional + self._schema)
        torch.library.register_fake(add_op_namespace_prefix(functional), allocate, lib=_library)
        _library.impl(functional, allocate_and_run, "CompositeExplicitAutograd")
        self._calls[backend] = (getattr(getattr(ops, self.name), backend), out_call)
        self.backends = tuple(self._calls)

    def _triton_out(self, *args: Any) -> Any:
        inputs = len(args) - len(self.results)
        args = (*self.structured(args[:inputs]), *args[inputs:])
        run = getattr(importlib.import_module(".triton_kernel", self._package), f"{self.name}_out")
        device = args[-1].device  # of a result
        if device.type == "cpu":  # interpreted
            return run(*args)
        with torch.cuda.device(device):  # Triton launches on the current device, whatever its tensors say
            return run(*args)

    def overload(self, backend: str, *, out: bool = False) -> Any:
        """The torch operator of a backend."""
        return self._calls[backend][int(out)]

    def __call__(
        self, *args: Any, device: torch.device, backend: str | None, out: Results | None = None, vocabulary: Any = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        """Run on the chosen backend; `out` receives the results if given, and is returned.

        A `vocabulary` of which ranks hold parts, and `more` about it, the reference alone takes.
        """
        if vocabulary is not None:
            results = self.reference(*self.structured(args), vocabulary=vocabulary, **more)
            return self.deliver(args, results, out)
        chosen = _backends.choose(self.name, self.backends, device, backend)
        if out is not None:
            self._check_out(args, out, device)
        if chosen == "reference":
            return _copied(self.reference(*self.structured(args)), out)
        if out is None and torch.compiler.is_compiling():
            return self._calls[chosen][0](*args)
        # The functional operator does the same, after a second trip through the dispatcher (25 us).
        results = self._allocate(args, device) if out is None else out
        self._calls[chosen][1](*args, *_listed(results))
        return results

    def _allocate(self, args: Sequence[Any], device: torch.device) -> Any:
        """Empty results of a call."""
        # By its name `size` is parsed in half the time: torch first tries a positional one as one of several ints.
        results = tuple([torch.empty(size=shape, dtype=dtype, device=device) for shape, dtype in self._shapes(*args)])
        return results if len(results) > 1 else results[0]

    def structured(self, args: Sequence[Any]) -> list[Any]:
        """The reference's arguments, from the flat ones."""
        flat = iter(args)
        return [_filled(layout, flat) for layout in self._layouts]

    def deliver(self, args: tuple[Any, ...], results: Any, out: Results | None) -> Any:
        """Results that another spelling of the op gave for `args`; `out` receives them if given."""
        if out is not None:
            self._check_out(args, out, _listed(results)[0].device)
        return _copied(results, out)

    def _check_out(self, args: tuple[Any, ...], given: Results, device: torch.device) -> None:
        out = (given,) if len(self.results) == 1 else given
        if not isinstance(out, tuple) or len(out) != len(self.results):
            wanted = ", ".join(self.results)
            raise ValueError(f"{self.name}: out must be what {self.name} returns ({wanted}), got {type(out).__name__}")
        for i, (shape, dtype) in enumerate(self._shapes(*args)):
            name, have = self.results[i], out[i]
            if not isinstance(have, Tensor) or have.dtype != dtype or have.shape != shape:
                got = f"{have.dtype} {list(have.shape)}" if isinstance(have, Tensor) else type(have).__name__
                raise ValueError(f"{self.name}: out.{name} must be {dtype} {list(shape)}, got {got}")
            if have.device != device:
                raise ValueError(f"{self.name}: out.{name} must be on {device}, got {have.device}")
            if not have.is_contiguous():
                raise ValueError(f"{self.name}: out.{name} must be contiguous, got strides {list(have.stride())}")


def _flat(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the signature of a reference in which the fields of each NamedTuple are parameters."""

    def flat() -> None: ...

    named = [field for name, kind in _parameters(reference).items() for field in _fields(name, kind)]
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for n, kind in named]
    returns = get_type_hints(reference)["return"]
    flat.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return flat


def _parameters(reference: Callable[..., Any]) -> dict[str, Any]:
    """Name and type of each parameter that the operator has too: those not keyword-only."""
    hints = get_type_hints(reference)
    given = inspect.signature(reference).parameters.values()
    return {p.name: hints[p.name] for p in given if p.kind != p.KEYWORD_ONLY}


def _fields(name: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """A parameter's name and type, or those of the fields of a NamedTuple: `draft_sampling` gives `draft_top_k`."""
    if not hasattr(kind, "_fields"):
        yield name, kind
        return
    prefix = name[: name.rfind("_") + 1]
    for field, inner in get_type_hints(kind).items():
        yield from _fields(prefix + field, inner)


def _layout(kind: Any) -> tuple[Any, list[Any]] | None:
    """A NamedTuple and the layouts of its fields; None for what is one argument."""
    return (kind, [_layout(inner) for inner in get_type_hints(kind).values()]) if hasattr(kind, "_fields") else None


def _filled(layout: tuple[Any, list[Any]] | None, flat: Iterator[Any]) -> Any:
    """The next flat argument, or a NamedTuple of as many as it has fields."""
    if layout is None:
        return next(flat)
    kind, fields = layout
    return kind(*[_filled(field, flat) for field in fields])


def _copied(results: Any, out: Results | None) -> Any:
    """The results, or `out` with their values."""
    if out is None:
        return results
    for have, value in zip(_listed(out), _listed(results), strict=True):
        have.copy_(value)
    return out


def _listed(results: Results) -> Tensors:
    """Results of an op as a tuple."""
    return (results,) if isinstance(results, Tensor) else results


def _do_nothing(*_: Any) -> None:
    """Fake of an operator that only writes its arguments."""
