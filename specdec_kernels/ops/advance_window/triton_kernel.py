"""advance_window in Triton: one launch for all layers and requests."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton.accepted import steps_of

CHANNELS = 256  # of a program


@triton.jit
def _advance_kernel(
    window, to, slots, inputs, of, num_accepted, path, columns, nodes, slot_of, status, batch, channels, width, blocks,
    PATH: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The window as it is and the inputs of the accepted nodes are one row, of which the end stays.

    Grid: layers * batch * blocks; a program owns CHANNELS channels. `to` and `of` are strides.
    """
    pid = tl.program_id(0).to(tl.int64)
    block, b, layer = pid % blocks, pid // blocks % batch, pid // blocks // batch
    is_writer = (layer == 0) & (block == 0)
    slot, count, acts = steps_of(b, num_accepted, path, columns, nodes, slot_of, slots, status, is_writer, PATH)
    if acts:
        c, j = (block * CHANNELS + tl.arange(0, CHANNELS))[:, None], tl.arange(0, WIDTH)[None, :].to(tl.int64)
        mask = (c < channels) & (j < width)
        source, step = count + 1 + j, count + 1 + j - width
        node = step
        if path is not None:
            node = tl.load(path + b * columns + step - 1, mask=(step > 0) & (j < width), other=0).to(tl.int64)
        row = window + layer * to[0] + slot * to[1] + c * to[2]
        tokens = inputs + layer * of[0] + b * of[1] + c * of[3]
        old = tl.load(row + source * to[3], mask=mask & (step < 0), other=0)
        new = tl.load(tokens + node * of[2], mask=mask & (step >= 0), other=0)
        tl.debug_barrier()  # a number is read before another thread writes there
        tl.store(row + j * to[3], tl.where(step < 0, old, new), mask=mask)


def advance_window_out(
    window: Tensor, inputs: Tensor, num_accepted: Tensor, path: Tensor | None, slots: Tensor | None, out_status: Tensor
) -> None:
    """Launcher."""
    layers, num_slots, channels, width = window.shape
    batch, nodes = inputs.shape[1:3]
    columns, blocks = nodes - 1 if path is None else path.shape[1], triton.cdiv(channels, CHANNELS)
    host.launch(
        _advance_kernel, layers * batch * blocks,
        window, window.stride(), num_slots, inputs, inputs.stride(), num_accepted, path, columns, nodes, slots,
        out_status, batch, channels, width, blocks,
        PATH=host.power(columns), WIDTH=host.power(width), CHANNELS=min(CHANNELS, host.power(channels)),
    )  # fmt: skip
