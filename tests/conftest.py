"""The backend matrix: every test that takes `backend` runs on each backend that exists here."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one worker a core; tests of threads ask for theirs

sys.path.insert(0, str(Path(__file__).parent))

import interpreter

import specdec_kernels
from specdec_kernels import _native

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.patch_once()

_native.cpu_reason()  # loads the library: some tests call an overload before any public function

BACKENDS = ("reference", "cpu", "triton", "cuda_host", "cuda")
SLOW = ("triton", "cuda_host")  # interpreted here: fewer seeds, smaller vocabularies
MANY = (
    "thousand_seeds",
    "steps_with_drawn",
    "batch_sd_follows",
    "frequencies",
    "second_samples",
    "residual_distribution",
    "every_shape",
)  # hundreds of requests
# What smaller calls do not reach: sums and races over tiles, rows beyond their lists or found bad late, tree levels.
ALWAYS = ("several_tiles", "found_late", "level_by_level")


def _device(backend: str) -> str:
    if backend == "cuda" or (backend == "triton" and torch.cuda.is_available()):
        return "cuda"
    return "cpu"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models, which are slower on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cuda_host() -> None:
    """The CUDA sources compiled for the host, once a session."""
    from native.build import build, load_backend

    load_backend(build())


def pytest_addoption(parser: pytest.Parser) -> None:
    """--backend triton: the tests of one backend, on machines whose GPU the others do not need."""
    parser.addoption("--backend", choices=BACKENDS, help="run only the tests that are parametrised with this backend")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module that imports its `op` runs on the backends this op declares, another on its BACKENDS, or on all."""
    if "backend" in metafunc.fixturenames:
        op = getattr(metafunc.module, "op", None)
        named = getattr(metafunc.module, "BACKENDS", BACKENDS)
        declared = named if op is None else ("reference", *op.backends)
        names = [b for b in BACKENDS if b.removesuffix("_host") in declared]
        metafunc.parametrize("backend", names, indirect=True)


def _backend_of(item: pytest.Item) -> str | None:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    found: str | None = params.get("backend", params.get("fast_backend"))
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The fast tier runs a fixed quarter of what is interpreted here (2 s a test); `make test-all` runs all of it.

    Tests of one backend run in an order that mixes the ops: a run that is cut has seen some of each.
    """
    if wanted := config.getoption("--backend"):
        others = [item for item in items if _backend_of(item) != wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _backend_of(item) == wanted]
        items.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
    for item in items:
        interpreted = _backend_of(item) in SLOW
        chosen = zlib.crc32(item.nodeid.encode()) % 4 == 0 and not any(name in item.nodeid for name in MANY)
        chosen = chosen or any(name in item.nodeid for name in ALWAYS)
        if interpreted and not torch.cuda.is_available() and not chosen:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of a backend; calls inside the test run on it."""
    name: str = request.param
    if name == "cuda_host":
        request.getfixturevalue("cuda_host")
    elif name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with specdec_kernels.use_backend(name):
        yield name


@pytest.fixture(params=("reference", "cpu", "cuda"))
def fast_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Backends that draw millions of tokens in seconds; the interpreted ones are held to the same decisions instead."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with specdec_kernels.use_backend(request.param):
        yield request.param


@pytest.fixture
def device(backend: str) -> str:
    """Where the tensors of this backend live."""
    return _device(backend)


@pytest.fixture
def is_slow(backend: str, device: str) -> bool:
    """Whether this backend is interpreted here."""
    return backend in SLOW and device == "cpu"


ISAS = {"portable": 0, "avx2": 1, "avx512": 2, "amx": 3}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine."""
    best = torch.ops.specdec_kernels.cpu_isa()
    if torch.ops.specdec_kernels.set_cpu_isa(ISAS[request.param]) != ISAS[request.param]:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    torch.ops.specdec_kernels.set_cpu_isa(best)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts back the number of threads."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
