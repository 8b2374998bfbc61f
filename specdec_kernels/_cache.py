"""Where the rows of a key-value cache lie, in every layout that engines use, and how rows are found in it.

Every tensor is brought to one view, bytes ``[page, slot, head, byte]``: a dense cache is one whose request b owns the
one page b, a pool of slots one whose pages hold a single slot. Kernels see these views and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ._check import ID_DTYPES, fail
from ._codes import CacheFormat

FORMATS: dict[CacheFormat, tuple[int, int]] = {  # axes (page, slot)
    "bhld": (0, 2),
    "blhd": (0, 1),
    "hnd": (0, 2),
    "nhd": (0, 1),
    "slots": (0, 1),
}
PAGED = ("hnd", "nhd", "slots")


class Description(NamedTuple):
    """What launches need to know of the views of a cache, on the host."""

    addresses: tuple[int, ...]
    pointers: Tensor  # the same on the device
    unit: int  # the largest power of two up to 16 that all addresses and strides are multiples of
    widest: int  # bytes of a token's row over all heads
    fields: tuple[int, ...] | None  # strides, heads and bytes of a row where all views have the same


descriptions: MutableMapping[Tensor, Description] = WeakTensorKeyDictionary()  # of the table of each CacheLayout


def describe(views: Sequence[Tensor], pointers: Tensor) -> Description:
    """Views of a cache, whose addresses are `pointers` on the device."""
    addresses = tuple(t.data_ptr() for t in views)
    unit = math.gcd(16, *addresses, *(n for t in views for n in (*t.stride()[:3], t.shape[3])))
    shapes = {(*t.stride()[:3], *t.shape[2:]) for t in views}
    widest = max(t.shape[2] * t.shape[3] for t in views)
    return Description(addresses, pointers, unit, widest, shapes.pop() if len(shapes) == 1 else None)


class CacheLayout:
    """Keys, values and other per-token tensors of a cache, described once for all layers.

    Example:
        >>> import torch
        >>> from specdec_kernels import CacheLayout
        >>> keys, values = torch.zeros(4, 2, 8, 64, 16), torch.zeros(4, 2, 8, 64, 16)  # layer, batch, head, length, dim
        >>> CacheLayout([*keys, *values], "bhld")
        CacheLayout(8 tensors, 'bhld', 2 pages of 64)
    """

    def __init__(
        self, tensors: Sequence[Tensor] | Tensor, format: CacheFormat, block_table: Tensor | None = None
    ) -> None:
        """Check the tensors and describe them on their device; do it once, not in every step.

        Args:
            tensors: keys and values of every layer, in any order, with their scale planes if they have any; heads,
                dims and dtypes may differ from tensor to tensor. One stacked tensor stands for its slices along axis 0.
                What is moved is bytes, so every dtype is taken.
            format: the axes of each tensor; those in brackets may be missing (scales, latents) or more than one.

                * ``"bhld"``: ``[batch, head, length, (dim)]``, as transformers keeps them;
                * ``"blhd"``: ``[batch, length, (head, dim)]``; latent rows ``[batch, length, dim]`` too;
                * ``"nhd"``: ``[page, slot, (head, dim)]``, ``"hnd"``: ``[page, head, slot, (dim)]``: paged pools;
                * ``"slots"``: ``[slot, (head, dim)]``: a pool whose table names a slot for every token.
            block_table: int32 or int64 ``[batch, pages]``, needed by the last three: page (or slot) of each block
                of tokens, filled from the left, -1 where there is none. `rollback` writes it.

        Raises:
            ValueError: tensors that do not fit the format or one another, overlapping or scattered rows.
        """
        if not isinstance(format, str) or format not in FORMATS:
            fail("CacheLayout", "format", "one of " + ", ".join(map(repr, FORMATS)), repr(format))
        if not isinstance(tensors, Iterable) or (isinstance(tensors, Tensor) and tensors.dim() == 0):
            fail("CacheLayout", "tensors", "a sequence of tensors, or one stacked tensor", type(tensors).__name__)
        listed = list(tensors.unbind(0)) if isinstance(tensors, Tensor) else list(tensors)
        if not listed:
            fail("CacheLayout", "tensors", "at least one tensor", "none")
        self.format = format
        self.tensors = [_rows(f"tensors[{i}]", t, format) for i, t in enumerate(listed)]
        first = self.tensors[0]
        self.num_pages = min(t.shape[0] for t in self.tensors)
        self.page_size = min(t.shape[1] for t in self.tensors)
        for i, t in enumerate(self.tensors):
            if t.device != first.device:
                fail("CacheLayout", f"tensors[{i}]", f"on {first.device}", t.device)
            if format not in PAGED and t.shape[0] != first.shape[0]:
                fail("CacheLayout", f"tensors[{i}]", f"of batch {first.shape[0]}", t.shape[0])
            if format in PAGED and t.shape[1] != first.shape[1]:
                fail("CacheLayout", f"tensors[{i}]", f"of page size {first.shape[1]}", t.shape[1])
        if self.page_size == 0:
            fail("CacheLayout", "tensors", "of at least one slot", "length 0")
        self.block_table = self._checked(block_table)
        # Strides of page, slot and head, number of heads, bytes of a row: what a kernel on a device needs of a view.
        # The addresses of all views follow them.
        numbers = [n for t in self.tensors for n in (*t.stride()[:3], t.shape[2], t.shape[3])]
        numbers += [t.data_ptr() for t in self.tensors]
        self.table = torch.tensor(numbers, dtype=torch.int64).to(first.device)
        descriptions[self.table] = describe(self.tensors, self.table[-len(self.tensors) :])

    def _checked(self, block_table: Tensor | None) -> Tensor | None:
        is_paged = self.format in PAGED
        if (block_table is not None) != is_paged or not isinstance(block_table, (Tensor, type(None))):
            wanted = "a tensor [batch, pages]" if is_paged else "None"
            fail("CacheLayout", "block_table", f"{wanted} for format {self.format!r}", type(block_table).__name__)
        if block_table is None:
            return None
        if block_table.dtype not in ID_DTYPES or block_table.dim() != 2 or block_table.shape[1] == 0:
            got = f"{str(block_table.dtype).removeprefix('torch.')} {list(block_table.shape)}"
            fail("CacheLayout", "block_table", "int32 or int64 [batch, pages]", got)
        if block_table.device != self.tensors[0].device:
            fail("CacheLayout", "block_table", f"on {self.tensors[0].device}", block_table.device)
        if block_table.shape[1] > 1 and block_table.stride(1) != 1:
            fail("CacheLayout", "block_table", "dense in its last dimension", f"stride {block_table.stride(1)}")
        return block_table

    def with_block_table(self, block_table: Tensor) -> CacheLayout:
        """The same pools under another table (another batch), without describing them anew."""
        other = object.__new__(CacheLayout)
        other.__dict__.update(self.__dict__)
        other.block_table = other._checked(block_table)
        return other

    @property
    def batch(self) -> int:
        """Requests of a call."""
        return self.num_pages if self.block_table is None else self.block_table.shape[0]

    @property
    def capacity(self) -> int:
        """Slots that a request can have."""
        return self.page_size * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def device(self) -> torch.device:
        """Where the cache lives."""
        return self.tensors[0].device

    def __repr__(self) -> str:
        return f"CacheLayout({len(self.tensors)} tensors, {self.format!r}, {self.num_pages} pages of {self.page_size})"


def _rows(name: str, tensor: Tensor, format: CacheFormat) -> Tensor:
    """The view bytes [page, slot, head, byte] of a tensor of a cache."""
    if not isinstance(tensor, Tensor):
        fail("CacheLayout", name, "a tensor", type(tensor).__name__)
    tensor = tensor.detach()
    if format == "slots" and tensor.dim() > 0:
        tensor = tensor.unsqueeze(1)
    axes = FORMATS[format]
    if tensor.dim() <= max(axes):
        fail("CacheLayout", name, f"of at least {max(axes) + 1} axes for format {format!r}", list(tensor.shape))
    tensor = tensor.movedim(axes, (0, 1))
    parts = [[1, 1]]  # [size, stride] of merged axes, the innermost first
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size == 1:
            continue
        if stride == parts[-1][0] * parts[-1][1]:
            parts[-1][0] *= size
        else:
            parts.append([size, stride])
    if len(parts) > 2:
        fail("CacheLayout", name, "of dense rows, or of dense rows for each head", f"strides {list(tensor.stride())}")
    heads, head_stride = parts[1] if len(parts) == 2 else (1, parts[0][0])
    sizes, strides = (*tensor.shape[:2], heads, parts[0][0]), (tensor.stride(0), tensor.stride(1), head_stride, 1)
    reach = 0  # of the axes so far, the innermost first: from the first element to the last
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride <= reach:
            expected = "of rows with memory of their own, neither expanded nor overlapping"
            fail("CacheLayout", name, expected, f"strides {list(tensor.stride())}")
        reach += stride * (size - 1)
    return tensor.as_strided(sizes, strides).view(torch.uint8)


class Place(NamedTuple):
    """Where positions of requests lie: [batch, n] each."""

    page: Tensor
    slot: Tensor
    exists: Tensor  # bool: the table names a page of the pool; page and slot are 0 where not


def locate(block_table: Tensor | None, page_size: int, num_pages: int, position: Tensor) -> Place:
    """Page and slot of each position [batch, n]."""
    if block_table is None:
        block_table = torch.arange(num_pages, device=position.device)[:, None]
    index = position.div(page_size, rounding_mode="floor")
    inside = (index >= 0) & (index < block_table.shape[1])
    page = block_table.long().gather(1, torch.where(inside, index, 0))
    exists = inside & (page >= 0) & (page < num_pages)
    return Place(torch.where(exists, page, 0), torch.where(exists, position % page_size, 0), exists)


def move(tensors: list[Tensor], source: Place, target: Place, moves: Tensor) -> None:
    """Copy the rows marked in `moves` [batch, n]: all are read before the first is written."""
    from_page, from_slot, to_page, to_slot = (p[moves] for p in (*source[:2], *target[:2]))
    for rows in tensors:
        rows[to_page, to_slot] = rows[from_page, from_slot]
