"""A call of an op on a device that is not the current one, against the reference on the cpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_calls import CALLS, moved
from torch import Tensor
from torch.utils._pytree import tree_leaves

import specdec_kernels
from specdec_kernels import CacheLayout
from specdec_kernels._op import OPS

BACKENDS = ("cuda", "triton")


def agrees(op: str, backend: str, device: str) -> bool:
    """Whether `backend` gives on `device` what the reference gives; what is written in place too."""
    if backend not in OPS[op].backends:
        pytest.skip(f"{op} has no {backend}")
    (args, options), (here, same) = CALLS[op](1), CALLS[op](1)
    want = getattr(specdec_kernels, op)(*here, **same, backend="reference")
    there = moved(args, device)
    got = getattr(specdec_kernels, op)(*there, **moved(options, device), backend=backend)
    for x, y in zip(tensors((got, there)), tensors((want, here)), strict=True):
        assert x.device == torch.device(device)
        torch.testing.assert_close(x.cpu(), y)
    return True


def tensors(value: Any) -> list[Tensor]:
    """Those of results and arguments, and what a cache holds."""
    leaves = [t for v in tree_leaves(value) for t in (v.tensors if isinstance(v, CacheLayout) else [v])]
    return [t for t in leaves if isinstance(t, Tensor)]
