"""The logits that edits make of a row's: computed once a call, where they are listed, for all that reads the row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._edits import BLOCK, RowEdits
from . import launch as host
from .rows import Changes, Rows, ones, size_of, words_of

CHUNK = 512  # blocks of 64 ids that a program looks through


@triton.jit
def _flat_draft(cu, batch, total, number):
    """The flat draft row of a target row, -1 if it has none."""
    row = tl.full([], -1, tl.int64)
    for start in range(0, batch, 512):
        b = start + tl.arange(0, 512)
        first = tl.load(cu + b, mask=b < batch, other=-1).to(tl.int64)
        last = tl.load(cu + b + 1, mask=b < batch, other=-1).to(tl.int64)
        mine = (first >= 0) & (last <= total) & (first + b <= number) & (number < last + b)
        row = tl.maximum(row, tl.max(tl.where(mine, number - b, -1), axis=0))
    return row


@host.entry
def _change_kernel(rows, recipe, cu, plane, chunks, each, own, batch, total, CHUNK: tl.constexpr):
    """Of a logit l: v = l + bias; v > 0 ? v / repetition : v * repetition; less minus. Grid: rows * chunks.

    Each step takes the lowest id that is left of every block. Rows are numbered `each` a request, of which `own` are
    there; in a flat layout (0) as they lie, or as the target rows of flat draft rows.
    """
    pid = tl.program_id(0).to(tl.int64)
    number, chunk = pid // chunks, (pid % chunks).to(tl.int32)
    if cu is None:
        i = number % tl.maximum(each, 1)
        offset = tl.where(
            each == 0, number * rows.row, number // tl.maximum(each, 1) * size_of(rows.request) + i * rows.row
        )
        is_there = (each == 0) | (i < own)
    else:
        row = _flat_draft(cu, batch, total, number)
        offset, is_there = row * rows.row, row >= 0
    block = chunk * CHUNK + tl.arange(0, CHUNK)
    bits, before = words_of(rows.changes, number, rows.vocab, block, is_there & (block * 64 < rows.vocab))
    at = number * size_of(rows.changes.room) + before
    going = tl.max((bits != 0).to(tl.int32), axis=0)
    while going > 0:
        on = bits != 0
        lowest = bits & (bits ^ (bits - 1))
        x = tl.load(rows.ptr + offset + block * 64 + ones(lowest - 1), mask=on, other=0.0).to(tl.float32)
        bias = tl.load(recipe + at, mask=on, other=0.0)
        repetition = tl.load(recipe + plane + at, mask=on, other=1.0)
        minus = tl.load(recipe + 2 * plane + at, mask=on, other=0.0)
        x += bias
        x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition) - minus
        tl.store(rows.changes.logits + at, tl.where(bias == float("-inf"), bias, x), mask=on)
        bits = bits & (bits - 1)
        at += 1
        going = tl.max((bits != 0).to(tl.int32), axis=0)


def changed(rows: Rows, edits: RowEdits, own: int, cu_draft: Tensor | None) -> Rows:
    """Rows with the logits that their edits make; `own` of a request, 0 in a flat layout."""
    if edits.edit_bits is None or edits.edit_start is None or edits.edit_values is None:
        return rows
    _, count, room = edits.edit_values.shape
    logits = torch.empty(count * room, dtype=torch.float32, device=edits.edit_values.device)
    rows = rows._replace(changes=Changes(edits.edit_bits, edits.edit_start, logits, host.size(room)))
    chunks = triton.cdiv(rows.vocab, CHUNK * BLOCK)
    total, each = rows.ptr.shape[0], 0 if own == 0 else count // max(rows.ptr.shape[0], 1)
    host.launch(
        _change_kernel, count * chunks, rows, edits.edit_values, cu_draft, count * room, chunks, each, own,
        0 if cu_draft is None else cu_draft.shape[0] - 1, total, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    return rows
