"""tree_mask in Triton: one launch for depths and ancestor bits, one that writes each element of the format once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._codes import MASK_FORMATS
from ..._triton import launch as host
from ..._triton.trees import bits_kernel, padded

_BOOL, _ADDITIVE, _FLAT, _FLAT_PACKED, *_ = MASK_FORMATS.values()
_BLOCK = tl.constexpr(1024)  # elements a program writes
_FLAT_BLOCK = tl.constexpr(512)  # elements of a flat mask that a program writes; 1024 spill registers on sm_90
_WORDS = tl.constexpr(64)  # words a program writes
_MAX_NODES = tl.constexpr(1024)
_LONGEST_CACHE = tl.constexpr(2**40)  # products with it do not overflow


class _Bits(NamedTuple):
    """Predicate of a mask: key columns are left padding, cached tokens up to past, then the nodes."""

    ancestors: Any  # int32 [batch, nodes, words]
    depth: Any  # int32 [batch, nodes], -1 at padding
    past: Any  # int64 [batch] or None
    left_padding: Any
    window: Any
    nodes: Any
    words: Any


@triton.jit
def _start_of(bits, b):
    """Column of node 0 of request b, which there is."""
    start = b.to(tl.int64) * 0
    if bits.past is not None:
        start = tl.minimum(tl.maximum(tl.load(bits.past + b), 0), _LONGEST_CACHE)
    return start


@triton.jit
def _attends(bits, b, start, query, mine, key, mask):
    """Whether node `query` of request b, at depth `mine`, attends column `key`; b and query are in range."""
    node = key - start
    in_tree = mask & (node >= 0) & (node < bits.nodes)
    node = tl.where(in_tree, node, 0).to(tl.int32)
    row = b.to(tl.int64) * bits.nodes
    word = tl.load(bits.ancestors + (row + query) * bits.words + (node >> 5), mask=in_tree, other=0)
    unused = start * 0
    if bits.left_padding is not None:
        unused = tl.load(bits.left_padding + b)
    cached = (key >= unused) & (key < start) & (mine >= 0)
    seen = (in_tree & (((word >> (node & 31)) & 1) == 1)) | cached
    if bits.window > 0:
        below = tl.load(bits.depth + row + node, mask=in_tree, other=0)
        distance = tl.where(in_tree, mine - below, start + mine - key)
        seen = seen & (distance < bits.window)
    return mask & seen


@triton.jit
def _dense_kernel(bits, out, size, blocks, hidden: tl.constexpr, ADDITIVE: tl.constexpr):
    """Bool, or 0 and `hidden`. Grid: batch * nodes * blocks of columns."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks
    b, query = row // bits.nodes, row % bits.nodes
    key = (pid % blocks) * _BLOCK + tl.arange(0, _BLOCK)
    mask = key < size
    seen = _attends(bits, b, _start_of(bits, b), query, tl.load(bits.depth + row), key, mask)
    if ADDITIVE:
        value = tl.where(seen, 0.0, tl.full([], hidden, tl.float32)).to(out.dtype.element_ty)
        tl.store(out + row * size + key, value, mask=mask)
    else:
        tl.store(out + row * size + key, seen, mask=mask)


@triton.jit
def _words_kernel(bits, out, out_words, total):
    """32 nodes a word, the lowest first, over the nodes alone. Grid: blocks of the batch * nodes * out_words words."""
    at = tl.program_id(0).to(tl.int64) * _WORDS + tl.arange(0, _WORDS)
    mask = at < total
    row, w = tl.where(mask, at // out_words, 0), at % out_words
    word = tl.load(bits.ancestors + row * bits.words + w, mask=mask & (w < bits.words), other=0)
    if bits.window > 0:
        bit = tl.arange(0, 32)
        key = w[:, None] * 32 + bit[None, :]
        first = row // bits.nodes * bits.nodes  # of the request
        below = tl.load(bits.depth + first[:, None] + key, mask=mask[:, None] & (key < bits.nodes), other=0)
        is_near = tl.load(bits.depth + row)[:, None] - below < bits.window
        word &= tl.sum(is_near.to(tl.int32) << bit[None, :], axis=1)  # no bit twice: a sum is an or
    tl.store(out + at, word.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _offsets_kernel(bits, offsets, batch, PACKED: tl.constexpr):
    """Where the rows [nodes, past + nodes] of each request begin, in elements or bytes. Grid: one program."""
    total = tl.full([], 0, tl.int64)
    tl.store(offsets, total)
    for first in range(0, batch, _BLOCK):
        b = first + tl.arange(0, _BLOCK)
        length = (_start_of(bits, tl.minimum(b, batch - 1)) + bits.nodes) * bits.nodes
        if PACKED:
            length = (length + 7) // 8
        length = tl.where(b < batch, length, 0)
        tl.store(offsets + 1 + b, total + tl.cumsum(length, axis=0), mask=b < batch)
        total += tl.sum(length, axis=0)


@triton.jit
def _request_of(offsets, batch, element):
    """Request that holds an element (a scalar or a block): the last that begins at or before it."""
    low, high = element * 0, element * 0 + batch
    step = batch
    while step > 0:
        middle = (low + high) // 2
        begins = tl.load(offsets + middle) <= element
        low, high = tl.where(begins, middle, low), tl.where(begins, high, middle)
        step //= 2
    return tl.minimum(low, batch - 1)


@triton.jit
def _write_flat(bits, out, b, start, row, column, element, size, PER: tl.constexpr, IS_WIDE: tl.constexpr):
    """Elements of requests b, `column` elements behind the start of `row`; b, start and row may be scalars.

    IS_WIDE: they are scalars, and the elements lie in `row` and the one below.
    """
    bit = tl.arange(0, PER)
    column = column[:, None] + bit[None, :]
    width = start + bits.nodes
    last = bits.nodes - 1
    if IS_WIDE:
        down = (column >= width).to(tl.int64)
    else:
        # No 64-bit division: a column beyond 32 bits is at most a block behind a row's start, and rows are as long.
        fits = (column < 2147483647) & (width < 2147483647)
        quotient = tl.where(fits, column, 0).to(tl.int32) // tl.where(fits, width, 1).to(tl.int32)
        down = tl.where(fits, quotient.to(tl.int64), (column >= width).to(tl.int64))
    query = tl.minimum(row + down, last)
    depths = bits.depth + b.to(tl.int64) * bits.nodes
    if IS_WIDE:
        mine = tl.where(down == 0, tl.load(depths + tl.minimum(row, last)), tl.load(depths + tl.minimum(row + 1, last)))
    else:
        mine = tl.load(depths + query)
    mask = (row + down <= last) & (element < size)[:, None]
    seen = _attends(bits, b, start, query, mine, column - down * width, mask)
    value = tl.sum(seen.to(tl.int32) << bit[None, :], axis=1)
    tl.store(out + element, value.to(out.dtype.element_ty), mask=element < size)


@triton.jit
def _flat_kernel(bits, offsets, out, batch, size, PACKED: tl.constexpr):
    """Rows of every request one after the other, as bools or as bits. Grid: blocks of `size` elements or bytes."""
    PER: tl.constexpr = 8 if PACKED else 1
    COUNT: tl.constexpr = _FLAT_BLOCK // PER
    begin = tl.program_id(0).to(tl.int64) * COUNT
    ahead = tl.arange(0, COUNT)
    element = begin + ahead
    b0 = _request_of(offsets, batch, begin)
    start0 = _start_of(bits, b0)
    inside, width0 = (begin - tl.load(offsets + b0)) * PER, start0 + bits.nodes
    row0 = tl.sum(((tl.arange(0, _MAX_NODES) + 1) * width0 <= inside).to(tl.int64), axis=0)  # rows that end before it
    column0 = inside - row0 * width0
    if (b0 + 1 == batch) | (begin + COUNT <= tl.load(offsets + b0 + 1)):  # one request, whose facts are read once
        if width0 >= COUNT * PER:
            _write_flat(bits, out, b0, start0, row0, column0 + ahead * PER, element, size, PER, True)
        else:
            _write_flat(bits, out, b0, start0, row0, column0 + ahead * PER, element, size, PER, False)
    else:
        b = _request_of(offsets, batch, element)
        is_first = b == b0
        behind = tl.where(is_first, column0 + ahead * PER, (element - tl.load(offsets + b)) * PER)
        row = tl.where(is_first, row0, 0)
        _write_flat(
            bits, out, b[:, None], _start_of(bits, b)[:, None], row[:, None], behind, element, size, PER, False
        )  # fmt: skip


def tree_mask_out(
    parents: Tensor, past: Tensor | None, left_padding: Tensor | None, window: int, size: int, format: int,
    dtype: torch.dtype, mask: Tensor, offsets: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.tree_mask`."""
    batch, nodes = parents.shape
    words = (nodes + 31) // 32
    depth = parents.new_empty((batch, nodes), dtype=torch.int32)
    ancestors = parents.new_empty((batch, nodes, words), dtype=torch.int32)
    host.launch(bits_kernel, batch * words, parents, depth, ancestors, status, nodes, words, NP=padded(nodes))
    bits = _Bits(ancestors, depth, past, left_padding, window, nodes, words)
    if format in (_BOOL, _ADDITIVE):
        hidden = torch.finfo(dtype).min if format == _ADDITIVE else 0.0
        blocks = triton.cdiv(size, _BLOCK.value)
        host.launch(
            _dense_kernel, batch * nodes * blocks, bits, mask, size, blocks, hidden=hidden, ADDITIVE=format == _ADDITIVE
        )
    elif format in (_FLAT, _FLAT_PACKED):
        packed = format == _FLAT_PACKED
        host.launch(_offsets_kernel, 1, bits, offsets, batch, PACKED=packed)
        programs = triton.cdiv(size, _FLAT_BLOCK.value // (8 if packed else 1))
        if batch > 0:
            host.launch(_flat_kernel, programs, bits, offsets, mask, batch, size, PACKED=packed)
        else:
            mask.zero_()
    else:
        # 64-bit and 16-bit words are pairs and halves of 32-bit ones; up to 32 nodes there is one word of any width.
        out = mask.view(torch.int32) if mask.dim() == 3 else mask
        total = out.numel()
        host.launch(_words_kernel, triton.cdiv(total, _WORDS.value), bits, out, total // max(batch * nodes, 1), total)
