"""Linear layers of few rows beside torch's own: weights that come from memory, as in a decoding step on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from .cases import OpCase
from .minimum import moved
from .rows import DTYPES
from .suite import Run

SIZES = ((256, 256), (1536, 256), (4096, 256), (896, 896), (2048, 2048))  # outputs, inputs
WEIGHTS = 64 << 20  # bytes of all inputs of a case: more than caches keep
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class LinearCase(OpCase):
    """One shape."""

    outputs: int = 1536
    inputs: int = 256
    rows: int = 4
    dtype: str = "fp32"

    @property
    def words(self) -> str:
        """Sizes, rows, dtype."""
        return f"{self.inputs} to {self.outputs}, {self.rows} rows, {self.dtype}"


class LinearInput(NamedTuple):
    """One call."""

    x: Tensor
    weight: Tensor


CASES = [
    *(LinearCase("linear", rows=rows, dtype=dtype) for dtype in ("fp32", "bf16") for rows in (1, 4, 8, 16, 64, 128)),
    LinearCase("linear", threads=1),
    *(LinearCase("linear", *size) for size in SIZES if size != (1536, 256)),
]
QUICK = 2
if torch.cuda.is_available():  # it is a CPU's op
    CASES.clear()


def inputs(case: LinearCase) -> list[LinearInput]:
    """Many weights, one after the other."""
    dtype = DTYPES[case.dtype]
    count = -(-WEIGHTS // (case.outputs * case.inputs * dtype.itemsize))
    x = torch.randn(case.rows, case.inputs).to(dtype)
    return [LinearInput(x, torch.randn(case.outputs, case.inputs).to(dtype)) for _ in range(count)]


def ours(case: LinearCase, x: LinearInput, backend: str) -> Tensor:
    """One call of the kernel; elsewhere there is none."""
    if backend != "cpu":
        return torch_linear(x)
    out: Tensor = torch.ops.specdec_kernels.linear.cpu(x.x, x.weight, None)
    return out


def minimum(case: LinearCase, x: LinearInput, result: Tensor) -> int:
    """Bytes of the weight, the rows and the result."""
    return moved(x.x, x.weight, result)


def torch_linear(x: LinearInput) -> Tensor:
    """The layer as a model calls it."""
    return linear(x.x, x.weight)


def check(case: LinearCase, run: Run, x: LinearInput) -> None:
    """The products in float64."""
    want = linear(x.x.double(), x.weight.double())
    size = linear(x.x.double().abs(), x.weight.double().abs())
    assert ((run(x).double() - want).abs() <= TOLERANCE[x.x.dtype] * size).all()


def rivals(case: LinearCase, made: Sequence[LinearInput]) -> dict[str, Run]:
    """One."""
    return {"torch": torch_linear}
