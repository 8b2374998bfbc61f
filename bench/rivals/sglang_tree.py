"""SGLang's Triton tree kernels: mask, positions and links of a batch in one launch; verification from argmaxes.

They are what it runs where it has no CUDA: one program a request, a search through all nodes for every parent.
"""

from __future__ import annotations

from typing import Any

from . import _sglang, _sglang_tree
from ._sglang import version

__all__ = ["version"]
NAME = "SGLang tree"
WHY = "SGLang's tree builder and greedy verifier in Triton"
ORDER = 11
FILE = "kernels/ops/speculative/spec_tree.py"
RULES = ("greedy",)


def available() -> str | None:
    """None, or why it cannot run here."""
    return _sglang.available(FILE)


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    return _sglang_tree.supports(case, RULES)


def kernels() -> _sglang_tree.Kernels:
    """Its launchers."""
    file = _sglang.load(FILE)
    return _sglang_tree.Kernels(file.sgl_build_tree_kernel_triton, file.verify_tree_greedy_triton)
