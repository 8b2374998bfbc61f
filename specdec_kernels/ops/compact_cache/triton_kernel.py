"""compact_cache in Triton: one launch for all requests and tensors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..._triton import cache
from ..._triton import launch as host
from ..._triton.cache import Views, copy_rows, item_of, locate
from ..._triton.codes import S_LAYOUT


@triton.jit
def _compact_kernel(
    views, blocks, path, columns, num_accepted, lengths, status,
    PATH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """cache[b, lengths[b] + d] = cache[b, lengths[b] + path[b, d - 1]].

    Grid: batch * tensors * splits; a program owns some columns of the rows of one request in one tensor.
    """
    views = Views(*views)
    b, tensor, split = item_of(views)
    count, length = tl.load(num_accepted + b), tl.load(lengths + b).to(tl.int64)
    nodes = path + b * columns - 1  # nodes[d] is the node at depth d
    d = tl.arange(0, PATH) + 1
    used = (d <= count) & (d <= columns)
    node = tl.load(nodes + d, mask=used, other=0).to(tl.int64)
    before = tl.load(nodes + d - 1, mask=used & (d > 1), other=0).to(tl.int64)
    moves = used & (node > d)
    source_page, source_slot, reads = locate(blocks, b, length + node, moves)
    target_page, target_slot, writes = locate(blocks, b, length + d, moves)
    wrong = (used & (node <= before)) | (moves & ((reads & writes) == 0))
    bad = tl.max(wrong.to(tl.int32), axis=0) > 0
    bad = bad | (count < -1) | (count > columns) | ((count >= 0) & (length < 0))
    if (tensor == 0) & (split == 0):
        tl.store(status + b, tl.where(bad, S_LAYOUT, 0))
    if bad:
        return
    if PATH == ROWS:  # the whole path at once: it is at hand
        copy_rows(
            views, tensor, split, source_page, source_slot, target_page, target_slot,
            reads & writes,
            COLUMNS, UNIT, ELEMENT,
        )  # fmt: skip
    else:
        in_place = tl.sum((used & (node == d)).to(tl.int32), axis=0)
        for first in range(in_place + 1, count + 1, ROWS):
            to = first + tl.arange(0, ROWS)
            wanted = to <= count
            at = tl.load(nodes + to, mask=wanted, other=0).to(tl.int64)
            from_page, from_slot, has_source = locate(blocks, b, length + at, wanted)
            to_page, to_slot, has_target = locate(blocks, b, length + to, wanted)
            copy_rows(
                views, tensor, split, from_page, from_slot, to_page, to_slot,
                has_source & has_target,
                COLUMNS, UNIT, ELEMENT,
            )  # fmt: skip


def compact_cache_out(
    tensors: list[Tensor], table: Tensor, block_table: Tensor | None, page_size: int, num_pages: int,
    path: Tensor, num_accepted: Tensor, lengths: Tensor, out_status: Tensor,
) -> None:  # fmt: skip
    """Launcher."""
    batch, columns = path.shape
    views, constants = cache.views(tensors, table, batch)
    host.launch(
        _compact_kernel, batch * views.tensors * views.splits,
        views, cache.blocks(block_table, page_size, num_pages), path, columns, num_accepted, lengths, out_status,
        PATH=host.power(columns), ROWS=min(host.power(columns), cache.ROWS), **constants,
    )  # fmt: skip
