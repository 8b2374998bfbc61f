"""Which nodes of a step enter the state of each request."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import S_LAYOUT


@triton.jit
def steps_of(b, num_accepted, path, columns, nodes, slot_of, slots, status, is_writer, PATH: tl.constexpr):
    """(slot, accepted nodes, whether request b acts); one program of each request writes its status."""
    count = tl.load(num_accepted + b).to(tl.int64)
    slot = b
    if slot_of is not None:
        slot = tl.load(slot_of + b).to(tl.int64)
    acts = (count >= 0) & (slot != -1)
    bad = (count > columns) | (slot < 0) | (slot >= slots)
    if path is not None:
        d = tl.arange(0, PATH)
        used = (d < columns) & (d < count)
        node = tl.load(path + b * columns + d, mask=used, other=0).to(tl.int64)
        before = tl.load(path + b * columns + d - 1, mask=used & (d > 0), other=0).to(tl.int64)
        bad |= tl.max((used & ((node <= before) | (node >= nodes))).to(tl.int32), axis=0) > 0
    if is_writer:
        tl.store(status + b, tl.where((count < -1) | (acts & bad), S_LAYOUT, 0))
    return slot, count, acts & (bad == 0)
