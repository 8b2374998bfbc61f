"""tree_attention in Triton: programs share the keys of a request; a second launch merges what they found."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._check import fail
from ..._triton import cache
from ..._triton import launch as host
from ..._triton.cache import locate
from ..._triton.codes import S_LAYOUT

# (rows, keys, warps) of a program by what is multiplied (4: float32; else bytes of an element of the cache beside
# 16-bit queries) and the larger dim, rounded up: of what stays in registers on every GPU, what takes fewest
# instructions. The first that holds all rows of a key head, or the last: each block of rows reads the keys again, from
# the second-level cache. Dim 128, sm_90, instructions a key of all threads: (64, 32, 8) 4,200, (64, 64, 8) 2,900;
# (32, 64, 4) 1,800, (32, 128, 8) 1,500, (32, 128, 4) 890. It needs 82 KB of shared memory; AMD's GPUs and those before
# sm_80 have 64, and take half of the keys. Exact float32 products take no tensor cores; what is refused below spills
# 2 KB a thread.
BLOCKS = {
    2: {128: [(32, 128, 4), (64, 64, 8)], 256: [(32, 64, 8)], 512: [(32, 32, 8)]},
    1: {128: [(32, 128, 4)], 256: [(32, 64, 8)], 512: [(16, 32, 8)]},
    4: {128: [(16, 32, 8)], 256: [(16, 16, 8)], 512: [(16, 16, 8)]},
}
HIP_WARPS = 4  # of 64 lanes
FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
# By kind of byte and dtype. A byte at the upper end of 16 bits is shifted down until its exponent stands where the
# dtype has its own, and masked; what makes a number that is none overflow into one bit; by what that bit grows to the
# dtype's largest exponent; and 2^112 where the dtype's exponents begin as much lower.
WIDENED = {
    ("e4m3", torch.float16): (1, 0x3F80, 0x80, 0x4000, 1, False),
    ("e4m3", torch.bfloat16): (4, 0x07F0, 0x10, 0x0800, 15, True),
    ("e5m2", torch.bfloat16): (3, 0x0FE0, 0x80, 0x1000, 7, True),
}
REGISTERS = 255  # most of a thread in float32: without a limit sm_80 and sm_120 spill for a second program
# A request of R blocks of rows is cut into spans of at least SPAN * R keys, so it makes about length / SPAN programs a
# key head, and its partial results are at most half as large as the keys and values it reads once.
SPAN = tl.constexpr(256)
SPLITS = tl.constexpr(32)  # most spans of a request, which then grow
ENTRIES = tl.constexpr(256)  # of a block table that a program checks at once
LOG_2 = tl.constexpr(0.6931471805599453)


class _Tree(NamedTuple):
    """Who attends what."""

    ancestors: Any  # int32 [batch, nodes, words]
    lengths: Any  # [batch]
    nodes: Any
    words: Any
    window: Any
    capacity: Any  # positions that a request can have


class _Rows(NamedTuple):
    """Queries [batch, node, head, dim], or keys or values [page, slot, head, dim]; 8-bit floats as bytes."""

    data: Any  # None: values that are the first columns of the keys
    outer: Any
    inner: Any
    head: Any
    dim: Any
    scale: Any  # float32 [head]; None: 1
    scale_stride: Any


class _Results(NamedTuple):
    """What is written; `partial` holds for each program the outputs [BLOCK_M, DV], sums and maxima of its split."""

    output: Any  # [batch, node, head, value_dim]
    logsumexp: Any  # [batch, node, head]
    status: Any
    partial: Any  # float32


@triton.jit
def _present(tree, b, node, mask):
    """Whether nodes of request b are none of padding: they have the root among their ancestors."""
    return (tl.load(tree.ancestors + (b * tree.nodes + node) * tree.words, mask=mask, other=0) & 1) == 1


@triton.jit
def _depth(tree, b, node, mask):
    """Depths of nodes: ancestors but for themselves."""
    bit = tl.arange(0, 32)
    depth = tl.full(node.shape, -1, tl.int32)
    for w in range(0, tree.words):
        word = tl.load(tree.ancestors + (b * tree.nodes + node) * tree.words + w, mask=mask, other=0)
        depth += tl.sum((word[:, None] >> bit[None, :]) & 1, axis=1)
    return depth


@triton.jit
def _need(tree, blocks, b, NODES: tl.constexpr, PAGES: tl.constexpr):
    """(length, nodes up to the last that is present, first cached position that is read, bad) of request b.

    PAGES: a page that is none makes the request bad. Who only reads rows need not know: it finds none there.
    """
    node = tl.arange(0, NODES)
    length = tl.load(tree.lengths + b).to(tl.int64)
    width = tl.max(tl.where(_present(tree, b, node, node < tree.nodes), node + 1, 0), axis=0).to(tl.int64)
    bad = (length < 0) | (length > tree.capacity - width)
    length = tl.where(bad, 0, length)
    first = length * 0
    if tree.window > 0:
        first = tl.maximum(length - tree.window + 1, 0)
    if PAGES and blocks.entries is not None:
        last = tl.where(bad | (width == 0), 0, (length + width - 1) // blocks.page_size + 1)
        for i in range(first // blocks.page_size, last, ENTRIES):
            entry = i + tl.arange(0, ENTRIES)
            page = tl.load(blocks.entries + b * blocks.row + entry, mask=entry < last, other=0)
            bad = bad | (tl.max(((page < 0) | (page >= blocks.num_pages)).to(tl.int32), axis=0) > 0)
    return length, tl.where(bad, 0, width), first, bad


@triton.jit
def _load_rows(
    rows, h, place, first, last, dtype: tl.constexpr, D: tl.constexpr, FLOAT8: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Columns first to last of the cache's rows at places, [place, D]; 0 where there is none."""
    d = first + tl.arange(0, D)
    page, slot, exists = place
    at = rows.data + page * rows.outer + slot * rows.inner + h * rows.head
    row = tl.load(at[:, None] + d[None, :], mask=exists[:, None] & (d < last)[None, :], other=0)
    if FLOAT8 is not None:
        return _from_float8(row, dtype, FLOAT8, PTX)
    return row.to(dtype)


@triton.jit
def _from_float8(byte, dtype: tl.constexpr, FLOAT8: tl.constexpr, PTX: tl.constexpr):
    """Bytes of 8-bit floats as `dtype`, those of e4m3 divided by 256; PTX, if any, widens four at once."""
    if PTX is not None:
        # Pure code Triton would move behind shared memory, where it loads values byte by byte: 1,090 instructions a
        # block of keys in place of 570 (32 rows and keys, dim 128, 8 warps).
        return tl.inline_asm_elementwise(PTX, "=r,=r,r", [byte], dtype=dtype.value, is_pure=False, pack=4)
    # A half has the exponent of e5m2. That of e4m3 is 8 less, and its NaN would be a number.
    bits = byte.to(tl.int16)
    if FLOAT8 == "e4m3":
        size = bits & 0x7F
        half = ((bits & 0x80) << 8) | (size << 7) | tl.where(size == 0x7F, 0x7C00, 0)
    else:
        half = bits << 8
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def _scale_of(rows, h, FLOAT8: tl.constexpr):
    """What rows of head h, as `_load_rows` gives them, are multiplied by."""
    scale = 256.0 if FLOAT8 == "e4m3" else 1.0
    if rows.scale is not None:
        scale *= tl.load(rows.scale + h * rows.scale_stride)
    return scale


@triton.jit
def _dot(a, b, c, INTERPRETED: tl.constexpr):
    """Product added to c, in float32. The interpreter would take the bits of bfloat16 for integers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _attend(
    state, query, rest, keys, values, h, place, cut, scale, seen,
    D: tl.constexpr, REST: tl.constexpr, DV: tl.constexpr, FLOAT8: tl.constexpr, PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One-pass softmax: (sum of weights * values, sum of weights, largest score) with a block of keys added."""
    output, total, best = state
    dtype: tl.constexpr = query.dtype
    key = _load_rows(keys, h, place, 0, cut, dtype, D, FLOAT8, PTX)
    score = _dot(query, tl.trans(key), tl.zeros(seen.shape, tl.float32), INTERPRETED)
    if REST > 0:
        more = _load_rows(keys, h, place, cut, keys.dim, dtype, REST, FLOAT8, PTX)
        score = _dot(rest, tl.trans(more), score, INTERPRETED)
    score *= scale
    score = tl.where(seen, score, float("-inf"))
    larger = tl.maximum(best, tl.max(score, axis=1))
    base = tl.where(larger == float("-inf"), 0.0, larger)
    weight = tl.exp2(score - base[:, None])
    rescale = tl.exp2(best - base)
    total = total * rescale + tl.sum(weight, axis=1)
    block = key
    if values.data is not None:
        block = _load_rows(values, h, place, 0, values.dim, dtype, DV, FLOAT8, PTX)
    output = _dot(weight.to(dtype), block, output * rescale[:, None], INTERPRETED)
    return output, total, larger


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, DV: tl.constexpr):
    """The state before any key."""
    return (
        tl.zeros([BLOCK_M, DV], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
    )


@triton.jit
def _merge(
    results, first, step, splits, row, value_dim, is_row, present,
    BLOCK_M: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write rows of the results from the partial ones of programs first, first + step, ..; 0 and -inf at padding."""
    SIZE: tl.constexpr = BLOCK_M * (DV + 2)
    m, s = tl.arange(0, BLOCK_M), tl.arange(0, SPLITS)
    part = results.partial + first * SIZE
    at = part + s[:, None] * (step * SIZE) + BLOCK_M * DV + m[None, :]
    there = (s < splits)[:, None] & present[None, :]
    bests = tl.load(at + BLOCK_M, mask=there, other=float("-inf"))
    best = tl.where(present, tl.max(bests, axis=0), 0.0)
    total = tl.sum(tl.load(at, mask=there, other=0.0) * tl.exp2(bests - best[None, :]), axis=0)
    total = tl.where(present, total, 1.0)
    logsumexp = tl.where(present, best * LOG_2 + tl.log(total), float("-inf"))
    tl.store(results.logsumexp + row, logsumexp, mask=is_row)
    for c in range(0, value_dim, COLUMNS):
        d = c + tl.arange(0, COLUMNS)
        output = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        for i in range(0, splits):
            its = part + i * (step * SIZE)
            its_best = tl.load(its + BLOCK_M * (DV + 1) + m, mask=present, other=float("-inf"))
            its_output = tl.load(its + m[:, None] * DV + d[None, :], mask=present[:, None], other=0.0)
            output += its_output * tl.exp2(its_best - best)[:, None]
        output = (output / total[:, None]).to(results.output.dtype.element_ty)
        tl.store(
            results.output + row[:, None] * value_dim + d[None, :],
            output,
            mask=is_row[:, None] & (d < value_dim)[None, :],
        )


@triton.jit
def _cut(
    tree, blocks, b, group, NODES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGES: tl.constexpr
):  # fmt: skip
    """(length, width, first key, bad tree, blocks of rows with nodes, keys of a split, splits) of a request."""
    length, width, first, bad = _need(tree, blocks, b, NODES, PAGES)
    busy = (width * group + BLOCK_M - 1) // BLOCK_M
    longest = (length - first + SPLITS - 1) // SPLITS
    span = tl.maximum(busy * SPAN, (longest + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    splits = tl.where(busy > 0, tl.maximum((length - first + span - 1) // tl.maximum(span, 1), 1), 0)
    return length, width, first, bad, busy, span, splits


@triton.jit
def _rows_of(tree, b, h, block, width, kv_heads, group, BLOCK_M: tl.constexpr):
    """(node, query head, whether it is a row, whether its node is there, place in the results) of a block of rows."""
    r = block * BLOCK_M + tl.arange(0, BLOCK_M)
    node, head = r // group, h * group + r % group
    present = _present(tree, b, node, node < width)
    return node, head, node < tree.nodes, present, (b * tree.nodes + node) * (kv_heads * group) + head


@triton.jit
def _merge_kernel(
    tree, blocks, results, value_dim, kv_heads, group, row_blocks, units,
    NODES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Merges the splits of a block of rows, in order. Grid: batch * kv_heads * row_blocks."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % row_blocks
    b = pid // row_blocks // kv_heads
    h = pid // row_blocks % kv_heads
    _, width, _, bad, busy, _, splits = _cut(tree, blocks, b, group, NODES, BLOCK_M, BLOCK_N, True)
    if (block == 0) & (h == 0):
        tl.store(results.status + b, tl.where(bad, S_LAYOUT, 0))
    _, _, is_row, present, row = _rows_of(tree, b, h, block, width, kv_heads, group, BLOCK_M)
    parts = tl.where(block < busy, splits, 0)
    first = pid // row_blocks * units + block
    _merge(results, first, busy, parts, row, value_dim, is_row, present, BLOCK_M, DV, COLUMNS=min(DV, 32))


@triton.jit
def _attend_kernel(
    query, keys, values, tree, blocks, results, scale, cut, kv_heads, group, units,
    NODES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, REST: tl.constexpr,
    DV: tl.constexpr, FLOAT8: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """output[b, n, h] = sum over attended x of softmax(scale query[b, n, h] . key[x, g]) value[x, g].

    Rows are (node, query head) pairs of one key head. The cached keys are cut by the request's own length and nodes
    alone; the tree's own belong to split 0. Splits are merged in order, so a result has the same bits in any batch.
    Grid: batch * kv_heads * units; a program owns one block of rows and one split, neighbours share the split's keys.

    Keys are read as columns before `cut` and those behind it, padded to D and REST.
    """
    pid = tl.program_id(0).to(tl.int64)
    u = pid % units
    h = pid // units % kv_heads
    b = pid // units // kv_heads
    length, width, first, _bad, busy, span, splits = _cut(tree, blocks, b, group, NODES, BLOCK_M, BLOCK_N, False)
    block, split = u % tl.maximum(busy, 1), u // tl.maximum(busy, 1)
    if u < busy * splits:
        node, head, _is_row, present, _row = _rows_of(tree, b, h, block, width, kv_heads, group, BLOCK_M)
        d = tl.arange(0, D)
        state = _nothing(BLOCK_M, DV)
        at = query.data + b * query.outer + node * query.inner + head * query.head
        q = tl.load(at[:, None] + d[None, :], mask=present[:, None] & (d < cut)[None, :], other=0.0)
        rest = None
        if REST > 0:
            d = cut + tl.arange(0, REST)
            rest = tl.load(at[:, None] + d[None, :], mask=present[:, None] & (d < query.dim)[None, :], other=0.0)
        if FLOAT8 is not None:
            scale *= _scale_of(keys, h, FLOAT8)
        depth = node * 0
        if tree.window > 0:
            depth = _depth(tree, b, node, present).to(tl.int64)
        begin = first + split * span
        end = tl.minimum(begin + span, length)
        for x in range(begin, end, BLOCK_N):
            position = x + tl.arange(0, BLOCK_N)
            wanted = position < end
            seen = wanted[None, :] & ((tree.window == 0) | (length + depth[:, None] - position[None, :] < tree.window))
            place = locate(blocks, b, position, wanted)
            state = _attend(
                state, q, rest, keys, values, h, place, cut, scale, seen, D, REST, DV, FLOAT8, PTX, INTERPRETED
            )  # fmt: skip
        if split == 0:
            TREE_N: tl.constexpr = min(BLOCK_N, 32)  # keys of one word of ancestors
            for j in range(0, width, TREE_N):
                other = j + tl.arange(0, TREE_N)
                wanted = _present(tree, b, other, other < width)
                word = tl.load(tree.ancestors + (b * tree.nodes + node) * tree.words + (j >> 5), mask=present, other=0)
                seen = wanted[None, :] & (((word[:, None] >> (other & 31).to(tl.int32)[None, :]) & 1) == 1)
                if tree.window > 0:
                    seen = seen & (depth[:, None] - _depth(tree, b, other, wanted)[None, :] < tree.window)
                place = locate(blocks, b, length + other, wanted)
                state = _attend(
                    state, q, rest, keys, values, h, place, cut, scale, seen, D, REST, DV, FLOAT8, PTX, INTERPRETED
                )  # fmt: skip

        output = state[0]
        if FLOAT8 is not None:
            output *= _scale_of(values, h, FLOAT8)
        m, dv = tl.arange(0, BLOCK_M), tl.arange(0, DV)
        mine = results.partial + pid * (BLOCK_M * (DV + 2))
        tl.store(mine + m[:, None] * DV + dv[None, :], output)
        tl.store(mine + BLOCK_M * DV + m, state[1])
        tl.store(mine + BLOCK_M * (DV + 1) + m, state[2])


@functools.cache
def widening_ptx(float8: str, dtype: torch.dtype) -> str:
    """PTX that makes two pairs of `dtype` of four bytes in a register; see `_from_float8`.

    Four bytes take 12 to 18 instructions, two or four of e5m2 as halves; one byte after the other takes 80.
    """
    lines = [".reg .b32 x, y, z, c, d;", "mov.b32 c, 0x77807780;", "mov.b32 d, 0x80008000;"]  # 2^112 and -0, twice
    for i, bytes_of in enumerate(("0x1404", "0x3424")):
        lines.append(f"prmt.b32 x, $2, 0, {bytes_of};")
        if (float8, dtype) not in WIDENED:  # e5m2 is the upper half of a half
            lines.append(f"mov.b32 ${i}, x;")
            continue
        shift, mask, add, bit, times, is_scaled = WIDENED[float8, dtype]
        mask, add, bit = (pair * 0x10001 for pair in (mask, add, bit))
        lines += [f"shr.u32 y, x, {shift};", f"and.b32 y, y, {mask};", f"add.u32 z, y, {add};", f"and.b32 z, z, {bit};"]
        lines += [f"mad.lo.u32 y, z, {times}, y;", "and.b32 x, x, 0x80008000;", "or.b32 x, x, y;"]
        lines.append(f"fma.rn.bf16x2 ${i}, x, c, d;" if is_scaled else f"mov.b32 ${i}, x;")
    return "{" + " ".join(lines) + "}"


def blocks_of(size: int, widest: int, rows: int) -> tuple[int, int, int]:
    """Of `BLOCKS`, for so many rows a key head."""
    options = BLOCKS[size][widest]
    return next((block for block in options if block[0] >= rows), options[-1])


def _rows(t: Tensor, scale: Tensor | None = None) -> _Rows:
    data = t.view(torch.uint8) if t.dtype in FLOAT8 else t
    page, slot, head, _ = t.stride()
    return _Rows(data, page, slot, head, t.shape[3], scale, 0 if scale is None else scale.stride(0))


def _cut_columns(dim: int, value_dim: int, *, is_shared: bool) -> tuple[int, int, int]:
    """(cut, D, REST) of keys: two powers of two waste less than one, and values that are keys are the first part."""
    cut = value_dim if is_shared else dim if dim <= 256 else 1 << (dim.bit_length() - 1)
    return cut, max(host.power(cut), 16), max(host.power(dim - cut), 16) if dim > cut else 0


def tree_attention_out(
    query: Tensor, key: Tensor, value: Tensor, ancestors: Tensor, lengths: Tensor, block_table: Tensor | None,
    scale: float, window: int, key_scale: Tensor | None, value_scale: Tensor | None,
    output: Tensor, logsumexp: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.tree_attention`."""
    batch, nodes, heads, dim = query.shape
    num_pages, page_size, kv_heads, value_dim = value.shape
    blocks = cache.blocks(block_table, page_size, num_pages)
    group = heads // kv_heads
    is_shared = value.data_ptr() == key.data_ptr() and value.stride() == key.stride() and value_dim <= dim
    cut, block_d, block_rest = _cut_columns(dim, value_dim, is_shared=is_shared)
    block_dv = max(host.power(value_dim), 16)
    widest = min(max(host.power(max(dim, value_dim)), 128), 512)
    is_float32 = query.dtype == torch.float32
    is_interpreted = triton.knobs.runtime.interpret
    if is_float32 and (widest > 256 or key.dtype in FLOAT8) and not is_interpreted:
        expected = "bfloat16 or float16 where dims exceed 256 or keys are float8 (backend triton)"
        fail("tree_attention", "query", expected, query.dtype)
    float8, ptx = FLOAT8.get(key.dtype), None
    block_m, block_n, warps = blocks_of(4 if is_float32 else key.element_size(), widest, nodes * group)
    if not is_interpreted:
        target = triton.runtime.driver.active.get_current_target()
        if target.backend == "hip":
            warps = HIP_WARPS
        elif float8 is not None:
            ptx = widening_ptx(float8, query.dtype)
            warps = 8 if target.arch == 120 else warps  # with 4 it would spill
        if target.backend == "hip" or target.arch < 80:
            block_n = max(block_n // 2, 16)  # tl.dot takes no fewer
    row_blocks = triton.cdiv(nodes * group, block_m)
    capacity = page_size * blocks.blocks
    units = min(SPLITS.value * row_blocks, capacity // SPAN.value + row_blocks)
    programs = batch * kv_heads * units
    device = query.device
    partial = torch.empty(programs * block_m * (block_dv + 2), dtype=torch.float32, device=device)
    tree = _Tree(ancestors, lengths, nodes, ancestors.shape[2], window, capacity)
    results = _Results(output, logsumexp, status, partial)
    sizes = {"NODES": host.power(nodes), "BLOCK_M": block_m, "BLOCK_N": block_n, "DV": block_dv}
    keys, values = _rows(key, key_scale), _rows(value, value_scale)
    if is_shared:
        values = values._replace(data=None)
    host.launch(
        _attend_kernel, programs, _rows(query), keys, values, tree, blocks, results, scale / LOG_2.value, cut,
        kv_heads, group, units, D=block_d, REST=block_rest, FLOAT8=float8, PTX=ptx, INTERPRETED=is_interpreted,
        registers=REGISTERS if is_float32 else None, num_warps=warps,
        num_stages=2 if block_table is None else 3,  # dense rows are fetched ahead as they are: they need shared memory
        **sizes,
    )  # fmt: skip
    host.launch(
        _merge_kernel, batch * kv_heads * row_blocks, tree, blocks, results, value_dim, kv_heads, group, row_blocks,
        units, **sizes,
    )  # fmt: skip
