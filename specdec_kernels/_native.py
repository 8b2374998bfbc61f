"""Loads the native libraries of the wheel, or says exactly why one is missing."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
test_backends: list[str] = []  # that a test suite added: the CUDA sources run on the host


def _files(stem: str) -> list[Path]:
    return sorted(_FOLDER.glob(f"{stem}.*so")) + sorted(_FOLDER.glob(f"{stem}.*pyd"))


def _absence(stem: str) -> str:
    """Why there is no library of that name, and what to type."""
    cuda = "SPECDEC_BUILD_CUDA=1 " if stem == "_cuda" else ""
    install = f"{cuda}pip install --no-build-isolation"
    if (_FOLDER.parent / "setup.py").exists():
        return (
            f"{_FOLDER} is the source tree, where {stem} has not been built. Python imports it in place of an installed"
            f" package when it is started in {_FOLDER.parent}: start it in another folder, or build the tree in place"
            f" with `{install} -e .`"
        )
    return f"this installation was built without {stem}; `{install} .` in a clone of the repository builds it"


def _load(stem: str) -> str | None:
    """Load `<stem>*.so` of this package; None, or why it cannot be used."""
    files = _files(stem)
    if not files:
        return _absence(stem)
    try:
        torch.ops.load_library(str(files[0]))
    except OSError as error:
        return f"{files[0].name} does not load under torch {torch.__version__}: {error}"
    return None


@functools.cache
def cpu_reason() -> str | None:
    """Why the native CPU library is unusable, or None after loading it."""
    return _load("_cpu")


@functools.cache
def cuda_reason() -> str | None:
    """Why the native CUDA library is unusable, or None after loading it."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "this torch has no usable CUDA device"
    return _load("_cuda")
