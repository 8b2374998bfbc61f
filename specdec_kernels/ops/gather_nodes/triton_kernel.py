"""gather_nodes in Triton: one launch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton.codes import S_LAYOUT

TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
TILE = 1024


@triton.jit
def _gather_kernel(
    values, request, row, nodes, path, columns, out, units, splits, status, PATH: tl.constexpr, TILE: tl.constexpr
):
    """out[b, 0] = values[b, 0], out[b, d] = values[b, path[b, d - 1]] up to the path's end, then zeros.

    Grid: batch * columns * splits; a program owns some columns of one row of the result.
    """
    pid = tl.program_id(0).to(tl.int64)
    b, i, split = pid // splits // columns, pid // splits % columns, pid % splits
    d = tl.arange(0, PATH)
    read = d < columns - 1
    node = tl.load(path + b * columns + d, mask=read, other=-1).to(tl.int64)
    ends = read & ((node < 0) | (node >= nodes))
    end = tl.min(tl.where(ends, d, columns - 1), axis=0)  # nodes before it are the path
    if (i == 0) & (split == 0):
        stranger = tl.max((ends & (d == end) & (node != -1)).to(tl.int32), axis=0)
        tl.store(status + b, stranger * S_LAYOUT)
    mine = tl.sum(tl.where(d == i - 1, node, 0), axis=0)
    for first in range(split * TILE, units, splits * TILE):
        column = first + tl.arange(0, TILE)
        at = values + b * request + mine * row + column
        unit = tl.load(at, mask=(column < units) & (i <= end), other=0)
        tl.store(out + (b * columns + i) * units + column, unit, mask=column < units)


def gather_nodes_out(values: Tensor, path: Tensor, out_values: Tensor, out_status: Tensor) -> None:
    """Launcher."""
    values, out_values = values.view(torch.uint8), out_values.view(torch.uint8)
    (batch, columns), (_, nodes, size) = path.shape, values.shape
    strides = values.stride()[:2]
    unit = math.gcd(8, values.data_ptr(), out_values.data_ptr(), size, *strides)
    units = size // unit
    flat = values.as_strided((size,), (1,)) if batch else values.flatten()
    splits = min(triton.cdiv(units, TILE), 16)
    host.launch(
        _gather_kernel, batch * columns * splits,
        flat.view(TYPES[unit]), strides[0] // unit, strides[1] // unit, nodes, path, columns,
        out_values.flatten().view(TYPES[unit]), units, splits, out_status,
        PATH=host.power(columns), TILE=TILE, num_warps=4,
    )  # fmt: skip
