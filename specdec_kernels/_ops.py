"""Where this build's operators are registered. Another build has another file here (tools/hf_kernel)."""

from __future__ import annotations

import torch

NAMESPACE = "specdec_kernels"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(name: str) -> str:
    """Qualified name of an operator."""
    return f"{NAMESPACE}::{name}"
