"""Two GPUs that are none: cpu tensors that say they are on cuda:0 or cuda:1, and a torch.cuda that answers.

For rehearsals on machines without a GPU. Kept as on a real one: tensors of two devices do not mix, only a 0-dimensional
cpu tensor may join; numpy takes no GPU tensor; what waits for the device fails under set_sync_debug_mode("error") and
while a graph is captured; a Triton kernel runs where the current device is that of its tensors, else it fails. A graph
replays the operators that were called in its capture. CUDA kernels are the sources compiled for the host, Triton's are
interpreted. Times mean nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICES = 2
WAITS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique", "equal", "allclose")
# Calls that take tensors of the cpu beside those of a GPU.
MIXING = ("copy_", "__getitem__", "__setitem__", "to", "set_", "index_put_")
HEADER = {"name": "Fake GPU", "total_memory": 1 << 34, "multi_processor_count": 4, "L2_cache_size": 1 << 12}


class State:
    """What torch.cuda knows."""

    current = 0  # device
    capturing: Recorder | None = None
    debug = "default"
    launches: list[tuple[str, int]]  # (kernel, current device) of each Triton launch


STATE = State()
STATE.launches = []


def place(x: Any) -> int | None:
    """Index of the GPU that a tensor says it is on."""
    return getattr(x, "_fake_gpu", None)


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Tensors in nested lists and tuples; torch's own tree_leaves takes several times as long."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from tensors_of(x)


def put(result: Any, index: int | None) -> Any:
    """Mark all tensors of a result."""
    for x in tensors_of((result,)):
        x._fake_gpu = index  # type: ignore[attr-defined]
    return result


def wanted(device: Any) -> tuple[Any, int | None]:
    """(device for torch, index of the GPU) of a device argument."""
    if isinstance(device, int):
        return torch.device("cpu"), device
    d = torch.device(device)
    if d.type != "cuda":
        return d, None
    return torch.device("cpu"), STATE.current if d.index is None else d.index


class FakeGpu(TorchFunctionMode):
    """Says where tensors are, and fails where a GPU would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "specdec_kernels":
            return self.op(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__" and args and place(args[0]) is not None:
            if func == Tensor.device.__get__:  # type: ignore[attr-defined]
                return torch.device("cuda", place(args[0]))
            if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
                return True
        places = {place(x) for x in tensors_of((*args, *kwargs.values())) if place(x) is not None or x.dim()}
        index = next((p for p in places if p is not None), None)
        if index is not None:
            self.refuse(name, places, args)
        if name in ("cuda", "cpu"):
            target = STATE.current if name == "cuda" else None
            if index is not None and name == "cpu":
                wait("cpu")
            return put(args[0].clone() if target != index else args[0], target)
        if name == "to":
            return self.to(func, args, kwargs, index)
        if kwargs.get("device") is not None:
            kwargs["device"], index = wanted(kwargs["device"])
            return put(func(*args, **kwargs), index)
        result = func(*args, **kwargs)
        return put(result, index) if index is not None else result

    def refuse(self, name: str, places: set[int | None], args: Any) -> None:
        """Fail as a GPU does."""
        if name == "numpy" or name == "__array__":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if len(places) > 1 and name not in MIXING:
            raise RuntimeError(f"Expected all tensors to be on the same device ({name})")
        picks = name == "__getitem__" and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1:])
        )
        if name in WAITS or picks:
            wait(name)

    def to(self, func: Any, args: Any, kwargs: Any, index: int | None) -> Any:
        """Tensor.to with a device, a dtype, another tensor."""
        given = [kwargs["device"]] if kwargs.get("device") is not None else []
        given += [a for a in args[1:] if isinstance(a, (str, torch.device))]
        if not given:
            other = next((a for a in args[1:] if isinstance(a, Tensor)), args[0])
            return put(func(*args, **kwargs), place(other))
        device, target = wanted(given[0])
        if target is None and index is not None:
            wait("to")
        args = tuple(device if isinstance(a, (str, torch.device)) else a for a in args)
        if "device" in kwargs:
            kwargs["device"] = device
        result = func(*args, **kwargs)
        return put(result.clone() if result is args[0] and target != index else result, target)

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator of the package: CUDA on the host, Triton with launchers that see the fake."""
        from specdec_kernels._op import OPS

        name, _, backend = func._schema.name.removeprefix("specdec_kernels::"), None, func._overloadname
        marks = {place(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        index = next((m for m in marks if m is not None), None)
        if len(marks) > 1:
            raise RuntimeError(f"{name}.{backend}: tensors of two devices")
        if backend in ("cpu", "cuda") and (index is None) != (backend == "cpu"):
            raise NotImplementedError(f"{name}.{backend} has no kernel for these tensors")
        if backend == "triton" and name.endswith("_out"):
            with self:
                OPS[name.removesuffix("_out")]._triton_out(*args)
            return None
        if backend == "cuda":
            func = getattr(torch.ops.specdec_kernels, name).cuda_host
        return put(func(*args, **kwargs), index)


def wait(name: str) -> None:
    """Something that needs the device to be done."""
    if STATE.debug == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation ({name})")
    if STATE.capturing is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing ({name})")


class Recorder(TorchDispatchMode):
    """Keeps the operators of a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        def again() -> None:
            for have, value in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(have, Tensor) and have.data_ptr() != value.data_ptr():
                    have.copy_(value)

        self.calls.append(again)
        return result


class CUDAGraph:
    """Operators of a capture, in order."""

    def __init__(self) -> None:
        self.recorder = Recorder()

    def replay(self) -> None:
        """All of them again."""
        with torch._C.DisableTorchFunction():
            for call in self.recorder.calls:
                call()


@contextlib.contextmanager
def graph(made: CUDAGraph) -> Iterator[None]:
    """torch.cuda.graph."""
    STATE.capturing = made.recorder
    try:
        with made.recorder:
            yield
    finally:
        STATE.capturing = None


class Event:
    """A time of the host."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        wait("synchronize")

    def elapsed_time(self, end: Event) -> float:
        return max((end.at - self.at) * 1e3, 1e-3)


class Stream:
    """All work is done at once."""

    def __init__(self, device: Any = None) -> None:
        self.cuda_stream = id(self) & 0xFFFF

    def wait_stream(self, other: Stream) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        wait("synchronize")


class Generator(torch.Generator):
    """Of any device."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


def exchange(index: int) -> int:
    """Make a device the current one; the one before."""
    before = STATE.current
    if index >= 0:
        assert index < DEVICES, f"no device {index}"
        STATE.current = index
    return before


def launched(kept: Any) -> Any:
    """The interpreter's launch: on the current device, which must be that of the tensors."""

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self.fn, "__name__", "kernel")
        marks = {place(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        STATE.launches.append((name, STATE.current))
        if marks - {STATE.current, None}:
            raise RuntimeError(f"{name}: launched on cuda:{STATE.current}, its tensors are on {marks}")

        def run() -> None:
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                kept(self, *args, **kwargs)

        run()
        if STATE.capturing is not None:
            STATE.capturing.calls.append(run)

    return launch


def functions() -> dict[str, Any]:
    """What torch.cuda gets."""
    streams = [Stream() for _ in range(DEVICES)]
    return {
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: STATE.current,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "set_device": lambda device: exchange(wanted(device)[1] or 0),
        "get_device_properties": lambda *_: SimpleNamespace(**HEADER),
        "get_device_name": lambda *_: HEADER["name"],
        "get_device_capability": lambda *_: (9, 0),
        "synchronize": lambda *_: wait("synchronize"),
        "current_stream": lambda *_: streams[STATE.current],
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: STATE.capturing is not None,
        "set_sync_debug_mode": lambda mode: setattr(STATE, "debug", mode),
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }


@contextlib.contextmanager
def fake_gpu() -> Iterator[State]:
    """Two GPUs inside the block; the CUDA kernels compiled for the host are loaded before (conftest.cuda_host)."""
    from triton.runtime.interpreter import GridExecutor

    from specdec_kernels import _backends, _native

    assert "cuda_host" in _native.test_backends
    kept: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for name, value in functions().items():
        replace(torch.cuda, name, value)
    replace(torch, "Generator", Generator)
    replace(torch.version, "cuda", "13.0")
    replace(_native, "cuda_reason", lambda: None)
    replace(GridExecutor, "__call__", launched(GridExecutor.__call__))
    _backends._first_that_runs.cache_clear()
    STATE.current, STATE.capturing, STATE.debug = 0, None, "default"
    STATE.launches.clear()
    try:
        with FakeGpu():
            yield STATE
    finally:
        for owner, name, value in reversed(kept):
            setattr(owner, name, value)
        _backends._first_that_runs.cache_clear()
