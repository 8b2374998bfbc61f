"""select_state in Triton: one launch for all requests and tensors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..._triton import cache
from ..._triton import launch as host
from ..._triton.cache import Views, copy_rows, item_of, locate
from ..._triton.codes import S_LAYOUT


@triton.jit
def _select_kernel(
    views, blocks, num_accepted, status, COLUMNS: tl.constexpr, UNIT: tl.constexpr, ELEMENT: tl.constexpr
):
    """state[b, 0] = state[b, num_accepted[b]].

    Grid: batch * tensors * splits; a program owns some columns of the states of one request in one tensor.
    """
    views = Views(*views)
    b, tensor, split = item_of(views)
    count = tl.load(num_accepted + b).to(tl.int64) + tl.zeros([1], tl.int64)
    moves = count > 0
    source_page, source_slot, has_source = locate(blocks, b, count, moves)
    target_page, target_slot, has_target = locate(blocks, b, count * 0, moves)
    exists = has_source & has_target
    bad = (count < -1) | (moves & (exists == 0))
    if (tensor == 0) & (split == 0):
        tl.store(status + b + tl.arange(0, 1), tl.where(bad, S_LAYOUT, 0))
    copy_rows(
        views, tensor, split, source_page, source_slot, target_page, target_slot, moves & exists,
        COLUMNS, UNIT, ELEMENT,
    )  # fmt: skip


def select_state_out(
    tensors: list[Tensor], table: Tensor, block_table: Tensor | None, page_size: int, num_pages: int,
    num_accepted: Tensor, out_status: Tensor,
) -> None:  # fmt: skip
    """Launcher."""
    views, constants = cache.views(tensors, table, len(num_accepted))
    host.launch(
        _select_kernel, len(num_accepted) * views.tensors * views.splits,
        views, cache.blocks(block_table, page_size, num_pages), num_accepted, out_status, **constants,
    )  # fmt: skip
