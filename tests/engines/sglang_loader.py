"""SGLang's own modules without its CUDA packages: what is not installed is a stub that fails when called."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

# Packages that SGLang imports at the top of its files, and that sampling and verification never call.
STUBBED = ("IPython", "gguf", "orjson", "torchvision")


class Missing:
    """Whatever is imported from a stub: a decorator may take it, calling it on the way to a token may not."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.name}.{name}")

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        raise AssertionError(f"{self.name} is a stub: the package is not installed here")


class Stub(ModuleType):
    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


def is_for_sglang() -> bool:
    """Whether SGLang imports: others look a package up to see whether it is there, and must not find it."""
    frame = sys._getframe(1)
    while "importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        assert frame.f_back is not None
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("sglang")


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in STUBBED and is_for_sglang():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Last of the finders: an installed package is always preferred."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # kept: once the stub is loaded, transformers would see a torchvision
    if not any(isinstance(finder, Stubs) for finder in sys.meta_path):
        sys.meta_path.append(Stubs())
