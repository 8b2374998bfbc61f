"""Rivals: each file is one, with NAME, WHY, `version()`, `available()` (None, or why not) and a function an op.

An op's function takes what `bench/<op>.py` hands it and returns what the op returns first; a file leaves out the ops
that its rival does not have. `supports(case)` says why a case is not for it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

from . import eager, lazy
from ._compiled import Compiled


@functools.cache
def rivals() -> list[Any]:
    """Every rival, the plain ones first."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    modules: list[Any] = [importlib.import_module(f"{__name__}.{name}") for name in names]
    modules.append(Compiled(eager, "compiled eager", "`PyTorch` under `torch.compile`", 3))
    modules.append(Compiled(lazy, "compiled lazy", "`lean PyTorch` under `torch.compile`", 4))
    return sorted(modules, key=lambda module: module.ORDER)  # type: ignore[no-any-return]
