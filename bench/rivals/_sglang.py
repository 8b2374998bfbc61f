"""SGLang's kernels by file: the package itself wants CUDA libraries at import."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch


def version() -> str:
    """Of the package."""
    try:
        return f"sglang {metadata.version('sglang')}"
    except metadata.PackageNotFoundError:
        return "sglang, version unknown"


@functools.cache
def find(file: str) -> Path | None:
    """A file of the package, where it is installed."""
    spec = importlib.util.find_spec("sglang")
    places = spec.submodule_search_locations if spec else None
    return next((Path(p) / file for p in places or () if (Path(p) / file).exists()), None)


def available(file: str) -> str | None:
    """None, or why a kernel cannot run here."""
    try:
        found = find(file)
    except ImportError as error:
        return f"sglang cannot be looked into: {error}"
    if found is None:
        return "sglang is not installed (pip install --no-deps sglang==0.5.23; its files suffice)"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "its kernel is Triton: timed on a GPU only, metered by python -m bench.traffic"
    return None


# All that the kernel files want of the rest of the package.
STUBS = {
    "sglang": {},
    "sglang.srt": {},
    "sglang.srt.platforms": {"current_platform": None},
    "sglang.srt.platforms.interface": {"reject_out_of_tree_path": None},
    "sglang.srt.utils": {f"is_{name}": lambda: False for name in ("cpu", "cuda", "hip", "musa", "npu", "xpu")},
}


def stub(name: str) -> ModuleType:
    """A module that holds what STUBS says."""
    made = ModuleType(name)
    vars(made).update(STUBS[name])
    return made


@functools.cache
def load(file: str) -> ModuleType:
    """The file as a module of its own, on its Triton path; the package itself is not imported."""
    import triton.language  # noqa: F401 - before sys.modules is put back as it was

    path = find(file)
    assert path is not None
    spec = importlib.util.spec_from_file_location(f"sglang_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {name: stub(name) for name in STUBS}):
        spec.loader.exec_module(module)
    return module
