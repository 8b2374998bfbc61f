"""Rows of a cache on a device: where they lie, and moving the rows of one request.

Kernels see every tensor as units (the largest integers that all addresses and strides are multiples of), and reach it
through a table of addresses, since a launch cannot take a list of pointers. A CacheLayout has that table. Where a call
gets other tensors than the layout's (torch.compile may copy what it mutates), a table of theirs is built.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _cache
from .launch import power

ROWS = 8  # rows of a request that a program holds at once
UNITS = 256  # units of each of these rows
ITEMS = 2048  # programs that are enough to fill a GPU; more splits of a row would only look its place up again
ELEMENTS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

_captured: list[Tensor] = []  # tables that a graph will read again


class Views(NamedTuple):
    """The tensors of a cache."""

    address: Any  # int64 [tensors]
    table: Any  # int64 [tensors, 5]: strides of page, slot, head; heads; bytes of a row. None where all have the same
    fields: Any  # these then, else None
    tensors: Any
    splits: Any  # programs that share a row


class Blocks(NamedTuple):
    """Pages of the requests; without entries request b has the one page b."""

    entries: Any  # [batch, blocks] or None
    row: Any  # stride of a request
    blocks: Any
    page_size: Any
    num_pages: Any


@functools.lru_cache(maxsize=64)
def _address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64).to(device)


def views(tensors: list[Tensor], table: Tensor, requests: int) -> tuple[Views, dict[str, Any]]:
    """The tensors as kernels take them, and the constants (unit, tile) that go with them."""
    known = _cache.descriptions.get(table)
    addresses = tuple([t.data_ptr() for t in tensors])
    if known is None or known.addresses != addresses:
        device = tensors[0].device
        known = _cache.describe(tensors, _address_table(addresses, device))
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            _captured.append(known.pointers)
    size, fields = min(known.unit, 8), known.fields
    widest = known.widest // size
    columns = min(power(widest), UNITS)
    splits = min(triton.cdiv(widest, columns), max(1, ITEMS // max(len(tensors) * requests, 1)))
    constants = {"COLUMNS": columns, "UNIT": size, "ELEMENT": ELEMENTS[size], "num_warps": 4}
    return Views(known.pointers, None if fields else table, fields, len(tensors), splits), constants


def blocks(block_table: Tensor | None, page_size: int, num_pages: int) -> Blocks:
    """A block table as kernels take it."""
    if block_table is None:
        return Blocks(None, 0, 1, page_size, num_pages)
    return Blocks(block_table, block_table.stride(0), block_table.shape[1], page_size, num_pages)


@triton.jit
def locate(blocks, b, position, wanted):
    """(page, slot, exists) of the wanted positions (any shape) of request b."""
    index = position // blocks.page_size
    inside = wanted & (position >= 0) & (index < blocks.blocks)
    if blocks.entries is not None:
        at = blocks.entries + b * blocks.row + tl.where(inside, index, 0)
        page = tl.load(at, mask=inside, other=-1).to(tl.int64)
    else:
        page = tl.where(inside, b, -1)
    exists = (page >= 0) & (page < blocks.num_pages)
    return tl.where(exists, page, 0), position % blocks.page_size, exists


@triton.jit
def item_of(views):
    """(request, tensor, split) of this program."""
    pid = tl.program_id(0).to(tl.int64)
    return pid // views.splits // views.tensors, pid // views.splits % views.tensors, pid % views.splits


@triton.jit
def _field(views, tensor, i: tl.constexpr):
    """Field i of a tensor; what all tensors share came with the launch and costs no load."""
    return views.fields[i] if views.table is None else tl.load(views.table + tensor * 5 + i)


@triton.jit
def _columns(views, tensor, first, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """(offset, inside) of units first .. first + COLUMNS - 1 of a token's row, head after head."""
    head_stride, size = _field(views, tensor, 2) // UNIT, _field(views, tensor, 4) // UNIT
    column, heads = first + tl.arange(0, COLUMNS), _field(views, tensor, 3)
    return column // tl.maximum(size, 1) * head_stride + column % tl.maximum(size, 1), column < heads * size


@triton.jit
def _starts(views, tensor, page, slot, UNIT: tl.constexpr, ELEMENT: tl.constexpr):
    """Where rows of a tensor begin, [rows, 1]."""
    at = page * (_field(views, tensor, 0) // UNIT) + slot * (_field(views, tensor, 1) // UNIT)
    return tl.load(views.address + tensor).to(tl.pointer_type(ELEMENT)) + at[:, None]


@triton.jit
def _width(views, tensor, UNIT: tl.constexpr):
    return _field(views, tensor, 3) * (_field(views, tensor, 4) // UNIT)


@triton.jit
def copy_rows(
    views, tensor, split, source_page, source_slot, target_page, target_slot, moves,
    COLUMNS: tl.constexpr, UNIT: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """A group of rows of one request: all are read before any is written, whichever thread holds which column."""
    source = _starts(views, tensor, source_page, source_slot, UNIT, ELEMENT)
    target = _starts(views, tensor, target_page, target_slot, UNIT, ELEMENT)
    for first in range(split * COLUMNS, _width(views, tensor, UNIT), views.splits * COLUMNS):
        column, inside = _columns(views, tensor, first, UNIT, COLUMNS)
        mask = moves[:, None] & inside[None, :]
        units = tl.load(source + column[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(target + column[None, :], units, mask=mask)


@triton.jit
def zero_rows(
    views, tensor, split, page, slot, wanted, COLUMNS: tl.constexpr, UNIT: tl.constexpr, ELEMENT: tl.constexpr
):
    """Zeros in a group of rows of one request."""
    target = _starts(views, tensor, page, slot, UNIT, ELEMENT)
    for first in range(split * COLUMNS, _width(views, tensor, UNIT), views.splits * COLUMNS):
        column, inside = _columns(views, tensor, first, UNIT, COLUMNS)
        mask = wanted[:, None] & inside[None, :]
        tl.store(target + column[None, :], tl.zeros(mask.shape, ELEMENT), mask=mask)
