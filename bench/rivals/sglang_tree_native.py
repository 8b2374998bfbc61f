"""SGLang's native tree kernels: CUDA that it compiles at its first call, or the C++ of a CPU build of sgl_kernel."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from . import _sglang_tree
from ._sglang import version

__all__ = ["version"]
NAME = "native SGLang tree"
WHY = "SGLang's tree builder and verifiers in CUDA or C++, as its servers run them"
ORDER = 12
RULES = ("greedy", "target_only")


@functools.cache
def available() -> str | None:
    """None, or why it cannot run here."""
    try:
        kernels()
    except Exception as error:
        wanted = (
            "all of sglang, with what compiles its kernels"
            if torch.cuda.is_available()
            else "a CPU build of sgl_kernel, which its wheels are not"
        )
        reason = " ".join(str(error).split())
        return f"needs {wanted}: {type(error).__name__}: {reason[:100]}"
    return None


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    return _sglang_tree.supports(case, RULES if torch.cuda.is_available() else RULES[:1])


@functools.cache
def kernels() -> _sglang_tree.Kernels:
    """Its entry points."""
    if torch.cuda.is_available():
        tree = importlib.import_module("sglang.kernels.ops.speculative.tree")
        sampling = importlib.import_module("sglang.kernels.ops.speculative.sampling")
        return _sglang_tree.Kernels(
            tree.build_tree_kernel_efficient, tree.verify_tree_greedy, sampling.tree_speculative_sampling_target_only
        )
    importlib.import_module("sgl_kernel")
    ops = torch.ops.sgl_kernel
    return _sglang_tree.Kernels(ops.build_tree_kernel_efficient_cpu, ops.verify_tree_greedy_cpu)
