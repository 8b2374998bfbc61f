"""Caches in poisoned memory, and what an op must leave in them, worked out row by row."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_kernels import CacheLayout

FORMATS = ("bhld", "blhd", "nhd", "hnd", "slots")
GUARD = 64  # bytes of poison before and after every tensor


@dataclass
class Cache:
    """Tensors of one cache, each inside a buffer of random bytes."""

    format: str
    page_size: int
    buffers: list[Tensor] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    block_table: Tensor | None = None

    def layout(self) -> CacheLayout:
        """As an engine describes it."""
        return CacheLayout(self.tensors, self.format, self.block_table)

    def add(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, offset: int = 0) -> None:
        """One more tensor; `offset` bytes off the alignment that buffers have."""
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.randint(0, 256, (size + 2 * GUARD + offset,), dtype=torch.uint8).to(device)
        inner = buffer[GUARD + offset : GUARD + offset + size]
        self.buffers.append(buffer)
        self.tensors.append(inner.view(dtype).view(shape))

    def row(self, tensor: Tensor, b: int, position: int) -> Tensor:
        """All that `tensor` keeps for a position of request b, as a view."""
        if self.block_table is None:
            page, slot = b, position
        else:
            page, slot = int(self.block_table[b, position // self.page_size]), position % self.page_size
        if self.format in ("bhld", "hnd"):
            return tensor[page, :, slot]
        return tensor[page] if self.format == "slots" else tensor[page, slot]

    def bits(self) -> list[Tensor]:
        """Everything, poison too."""
        return [b.cpu().clone() for b in self.buffers]

    def twin(self) -> Cache:
        """A copy in memory of its own, for the oracle."""
        other = Cache(self.format, self.page_size)
        other.block_table = None if self.block_table is None else self.block_table.cpu().clone()
        for buffer, tensor in zip(self.buffers, self.tensors, strict=True):
            twin = buffer.cpu().clone()
            start = tensor.data_ptr() - buffer.data_ptr()
            other.buffers.append(twin)
            inner = twin[start : start + tensor.numel() * tensor.element_size()]
            other.tensors.append(inner.view(tensor.dtype).view(tensor.shape))
        return other


def make_cache(
    format: str,
    *,
    batch: int = 3,
    capacity: int = 24,
    page_size: int = 4,
    heads: tuple[int, ...] = (2, 2, 1),
    dims: tuple[int, ...] = (8, 8, 5),
    dtype: torch.dtype = torch.bfloat16,
    table_dtype: torch.dtype = torch.int32,
    scales: bool = False,
    offset: int = 0,
    device: str = "cpu",
) -> Cache:
    """One tensor for each of `heads`; pages of a request are scattered over the pool."""
    is_paged = format in ("nhd", "hnd", "slots")
    page_size = 1 if format == "slots" else page_size if is_paged else capacity
    cache = Cache(format, page_size)
    blocks = -(-capacity // page_size)
    pages = batch * blocks + 2 if is_paged else batch
    if is_paged:
        shuffled = torch.randperm(pages)[: batch * blocks].view(batch, blocks)
        cache.block_table = shuffled.to(table_dtype).to(device)
    for head, dim in zip(heads, dims, strict=True):
        for last in [(dim,), ()] if scales else [(dim,)]:
            shape = {
                "bhld": (batch, head, capacity, *last),
                "blhd": (batch, capacity, head, *last),
                "nhd": (pages, page_size, head, *last),
                "hnd": (pages, head, page_size, *last),
                "slots": (pages, head, *last),
            }[format]
            cache.add(shape, dtype if last else torch.float32, device, offset if last else 4 * (offset > 0))
    return cache


def compacted(cache: Cache, path: list[list[int]], lengths: list[int]) -> list[Tensor]:
    """Bits after compaction: node path[b][d - 1] of request b comes to slot lengths[b] + d."""
    twin = cache.twin()
    for tensor in twin.tensors:
        for b, nodes in enumerate(path):
            rows = [twin.row(tensor, b, lengths[b] + n).clone() for n in nodes]
            for d, row in enumerate(rows, 1):
                twin.row(tensor, b, lengths[b] + d).copy_(row)
    return twin.buffers


def assert_bits(cache: Cache, want: list[Tensor]) -> None:
    """Every byte of every buffer, the poison around the tensors too."""
    for i, (have, expected) in enumerate(zip(cache.bits(), want, strict=True)):
        wrong = (have != expected).nonzero().flatten()
        assert not len(wrong), f"tensor {i}: {len(wrong)} bytes differ, the first at {int(wrong[0])} of {len(have)}"


def random_tree(nodes: int, rng: random.Random) -> list[int]:
    """Parents; parents[0] = -1, parents[n] < n."""
    return [-1] + [rng.randrange(n) for n in range(1, nodes)]


def leaf_paths(parents: list[int]) -> list[list[int]]:
    """The path of every leaf, without the root."""
    paths = []
    for leaf in set(range(len(parents))) - set(parents):
        path: list[int] = []
        node = leaf
        while node > 0:
            path.insert(0, node)
            node = parents[node]
        paths.append(path)
    return paths


def padded(path: list[list[int]], columns: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> Tensor:
    """Paths as `verify_tree` returns them."""
    rows = [nodes + [-1] * (columns - len(nodes)) for nodes in path]
    return torch.tensor(rows, dtype=dtype, device=device).view(len(path), columns)


def counts(values: list[int], device: str = "cpu") -> Tensor:
    """num_accepted."""
    return torch.tensor(values, dtype=torch.int32, device=device)
