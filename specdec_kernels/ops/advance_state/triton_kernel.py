"""advance_state in Triton: one launch for all layers, requests and heads."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton.accepted import steps_of

COLUMNS = 64  # of the state a program: at d_k = 128, 64 numbers a thread


@triton.jit
def _at(x, layer, b, node, heads, head):
    """Where the numbers of a node's head begin, in `x` = (tensor, strides of layer and request, heads, dim)."""
    return x[0] + layer * x[1] + b * x[2] + (node * x[3] + head // (heads // x[3])) * x[4]


@triton.jit
def _to_nearest(s):
    """Rounded to bfloat16, to nearest even: the interpreter's own conversion cuts off."""
    bits = s.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(s == s, rounded.to(tl.float32, bitcast=True), s)


@triton.jit
def _replay(
    s, layer, b, head, heads, steps, path, columns, keys, values, decay, beta, k, in_k, v, in_v, GATES: tl.constexpr
):
    """The tile after the root and the first nodes of the path; GATES: 0 no decay, 1 one a head, 2 one a channel."""
    for d in range(steps):
        node = tl.full([], 0, tl.int64) + d
        if path is not None and d > 0:
            node = tl.load(path + b * columns + d - 1).to(tl.int64)
        key = tl.load(_at(keys, layer, b, node, heads, head) + k, mask=in_k, other=0).to(tl.float32)
        value = tl.load(_at(values, layer, b, node, heads, head) + v, mask=in_v, other=0).to(tl.float32)
        if GATES == 1:
            s *= tl.exp(tl.load(_at(decay, layer, b, node, heads, head)))
        if GATES == 2:
            s *= tl.exp(tl.load(_at(decay, layer, b, node, heads, head) + k, mask=in_k, other=0))[:, None]
        if beta is not None:
            rate = tl.load(_at(beta, layer, b, node, heads, head))
            value = rate * (value - tl.sum(s * key[:, None], axis=0))
        s += key[:, None] * value[None, :]
    return s


@triton.jit
def _advance_kernel(
    state, layer_stride, slot_stride, slots, keys, values, decay, beta, num_accepted, path, columns, nodes,
    slot_of, status, batch, heads, d_k, d_v, blocks,
    GATES: tl.constexpr, PATH: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """S = exp(g) S + k u^T for the root and the accepted nodes.

    Grid: layers * batch * heads * blocks; a program owns COLUMNS columns of a head's state, in registers.
    """
    pid = tl.program_id(0).to(tl.int64)
    block, head = pid % blocks, pid // blocks % heads
    b, layer = pid // blocks // heads % batch, pid // blocks // heads // batch
    is_writer = (layer == 0) & (head == 0) & (block == 0)
    slot, count, acts = steps_of(b, num_accepted, path, columns, nodes, slot_of, slots, status, is_writer, PATH)
    if acts:
        k, v = tl.arange(0, KEYS), block * COLUMNS + tl.arange(0, COLUMNS)
        in_k, in_v = k < d_k, v < d_v
        tile = state + layer * layer_stride + slot * slot_stride + head * d_k * d_v + k[:, None] * d_v + v[None, :]
        mask = in_k[:, None] & in_v[None, :]
        s = tl.load(tile, mask=mask, other=0).to(tl.float32)
        s = _replay(
            s, layer, b, head, heads, count + 1, path, columns, keys, values, decay, beta, k, in_k, v, in_v, GATES
        )
        if state.dtype.element_ty == tl.bfloat16:
            s = _to_nearest(s)
        tl.store(tile, s.to(state.dtype.element_ty), mask=mask)


def _inputs(x: Tensor | None) -> tuple[Any, ...] | None:
    """(tensor, strides of layer and request, heads, dim); None stays."""
    return None if x is None else (x, *x.stride()[:2], x.shape[3], x.shape[4] if x.dim() == 5 else 1)


def advance_state_out(
    state: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor | None, beta: Tensor | None, num_accepted: Tensor,
    path: Tensor | None, slots: Tensor | None, out_status: Tensor,
) -> None:  # fmt: skip
    """Launcher."""
    layers, num_slots, heads, d_k, d_v = state.shape
    batch, nodes = keys.shape[1:3]
    columns, blocks = nodes - 1 if path is None else path.shape[1], triton.cdiv(d_v, COLUMNS)
    host.launch(
        _advance_kernel, layers * batch * heads * blocks,
        state, *state.stride()[:2], num_slots, _inputs(keys), _inputs(values), _inputs(log_decay), _inputs(beta),
        num_accepted, path, columns, nodes, slots, out_status, batch, heads, d_k, d_v, blocks,
        GATES=0 if log_decay is None else log_decay.dim() - 3, PATH=host.power(columns), KEYS=host.power(d_k),
        COLUMNS=min(COLUMNS, host.power(d_v)),
    )  # fmt: skip
