"""Drafts by what followed the same suffix before: in a request's own text and in finished texts (suffix decoding).

The structure is native (csrc/cpu/suffix_index.h) and lives on the host, where engines know the committed tokens.
"""

from __future__ import annotations

import reprlib
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _native
from ._ops import NAMESPACE, ops

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema in (
    "suffix_create(int depth, int capacity) -> int",
    "suffix_destroy(int index) -> ()",
    "suffix_size(int index) -> int",
    "suffix_bytes(int index) -> int",
    "suffix_append(int index, Tensor token_ids) -> ()",
    "suffix_remember(int index, int text, int start) -> ()",
    "suffix_draft(Tensor texts, int memory, Tensor token_ids, Tensor cu_tokens, int length, float factor, float offset,"
    " float least, Tensor(a!) out_token_ids, Tensor(b!) out_lengths, Tensor(c!) out_scores) -> ()",
):
    _library.define(_schema)


class SuffixIndex:
    """The last tokens of one text, or of many: which sequences occur in them, how often, and what followed.

    One belongs to each running request, another may remember the texts of finished ones. A token takes under a
    microsecond, and 70 bytes, up to 1,000 where texts repeat themselves. After the first `capacity` tokens each new
    one takes the place of the oldest. An index is used by one thread at a time, and cannot be copied.
    """

    def __init__(self, *, depth: int = 16, capacity: int = 1 << 17) -> None:
        """Make an empty index.

        Args:
            depth: longest sequence that is counted: a suffix and its drafts. Behind it drafts follow the sequence's
                first occurrence. Time and memory of texts that repeat themselves grow with it.
            capacity: most tokens that are kept, at least `depth`.

        Raises:
            ValueError: a depth below 2, or a capacity below the depth.
            RuntimeError: there is no native library for the CPU.
        """
        for name, value in (("depth", depth), ("capacity", capacity)):
            if not isinstance(value, int) or value >= 2**63:
                raise ValueError(f"SuffixIndex: {name} must be an int below 2^63, got {value!r}")
        if depth < 2:
            raise ValueError(f"SuffixIndex: depth must be at least 2, got {depth}")
        if capacity < depth:
            raise ValueError(f"SuffixIndex: capacity must be at least depth = {depth}, got {capacity}")
        if (reason := _native.cpu_reason()) is not None:
            raise RuntimeError(f"SuffixIndex: {reason}")
        self.depth, self.capacity = depth, capacity
        self._handle: int = ops.suffix_create(depth, capacity)
        weakref.finalize(self, ops.suffix_destroy, self._handle)

    def __reduce__(self) -> Any:
        """Refuse to be copied: two objects would share what the first of them frees."""
        raise TypeError("SuffixIndex: it cannot be copied or pickled; make a new one and append its tokens")

    def __len__(self) -> int:
        """Tokens that came so far, kept or not."""
        size: int = ops.suffix_size(self._handle)
        return size

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        size: int = ops.suffix_bytes(self._handle)
        return size

    def append(self, token_ids: Tensor | Sequence[int]) -> None:
        """Tokens that continue the text, int32 or int64 ``[n]`` on the host, each at least 0.

        Raises:
            ValueError: anything else.
        """
        if not isinstance(token_ids, Tensor):
            try:
                dtype = None if len(token_ids) else torch.int64
                token_ids = torch.tensor(token_ids, dtype=dtype, device="cpu")
            except (TypeError, ValueError) as error:
                got = reprlib.repr(token_ids)
                raise ValueError(f"SuffixIndex.append: token_ids must be a sequence of ints, got {got}") from error
        _check_ids("SuffixIndex.append", token_ids)
        ops.suffix_append(self._handle, token_ids)

    def remember(self, text: SuffixIndex, start: int = 0) -> None:
        """A text that is complete, from its token `start` on: usually what followed the prompt.

        Raises:
            ValueError: the text is this index, or a negative start.
        """
        _check_index("SuffixIndex.remember: text", text)
        if text is self:
            raise ValueError("SuffixIndex.remember: text must be another index, got this one")
        if not isinstance(start, int) or not 0 <= start < 2**63:
            raise ValueError(f"SuffixIndex.remember: start must be an int >= 0, got {start!r}")
        ops.suffix_remember(self._handle, text._handle, start)


class SuffixDrafts(NamedTuple):
    """Drafts of `draft_suffixes`, on the host.

    Attributes:
        token_ids: int64 ``[batch, length]``, -1 behind the last draft.
        lengths: int64 ``[batch]``, drafts of each request.
        scores: float64 ``[batch]``, expected accepted drafts: the sum of the products of their frequencies.
    """

    token_ids: Tensor
    lengths: Tensor
    scores: Tensor


def draft_suffixes(
    texts: Sequence[SuffixIndex],
    token_ids: Tensor,
    cu_tokens: Tensor,
    *,
    length: int,
    memory: SuffixIndex | None = None,
    factor: float = 1.0,
    offset: float = 0.0,
    least: float = 0.1,
) -> SuffixDrafts:
    """Append what each text got, and draft how it goes on (suffix decoding, Oliaro et al.).

    Each suffix of up to ``depth - 1`` tokens that occurred before is followed by its most frequent continuation, token
    by token, while the product of their frequencies is at least `least`. The sum of these products is the expected
    number of accepted drafts; the suffix that promises most is drafted. Of equals a suffix of the text itself wins over
    one of `memory`, then the longer suffix; of tokens that followed equally often, the one that first did so.

    Args:
        texts: one of each request.
        token_ids: int32 or int64 ``[total]`` on the host: new tokens of all texts, one text behind the other.
        cu_tokens: int32 or int64 ``[batch + 1]`` on the host: where each text's new tokens begin, and the end.
        length: most drafts of a request.
        memory: texts of other requests.
        factor: a suffix of m tokens is trusted for ``factor * m + offset`` drafts.
        offset: see factor.
        least: smallest product of frequencies of a draft.

    Returns:
        `SuffixDrafts`.

    Raises:
        ValueError: tensors of a wrong shape, dtype or device, impossible ids or places, a negative length or factor.

    Example:
        >>> import torch
        >>> from specdec_kernels import SuffixIndex, draft_suffixes
        >>> text = SuffixIndex()
        >>> new, cu = torch.tensor([1, 2, 3, 4, 1, 2]), torch.tensor([0, 6])
        >>> draft_suffixes([text], new, cu, length=4).token_ids
        tensor([[ 3,  4, -1, -1]])
    """
    if not isinstance(texts, Sequence):
        raise ValueError(f"draft_suffixes: texts must be a list of SuffixIndex, got {type(texts).__name__}")
    for i, text in enumerate(texts):
        _check_index(f"draft_suffixes: texts[{i}]", text)
    if memory is not None:
        _check_index("draft_suffixes: memory", memory)
    batch = len(texts)
    _check_ids("draft_suffixes", token_ids)
    _check_vector("draft_suffixes: cu_tokens", cu_tokens)
    places = cu_tokens.tolist()
    if len(places) != batch + 1 or places != sorted(places) or (places[0], places[-1]) != (0, len(token_ids)):
        expected = f"{batch + 1} numbers that rise from 0 to {len(token_ids)} = len(token_ids)"
        raise ValueError(f"draft_suffixes: cu_tokens must be {expected}, got {places}")
    if not isinstance(length, int):
        raise ValueError(f"draft_suffixes: length must be an int, got {length!r}")
    if length < 0:
        raise ValueError(f"draft_suffixes: length must be at least 0, got {length}")
    for name, value in (("factor", factor), ("offset", offset), ("least", least)):
        if not isinstance(value, (int, float)):
            raise ValueError(f"draft_suffixes: {name} must be a number, got {value!r}")
    if least != least:
        raise ValueError(f"draft_suffixes: least must be a number, got {least}")
    if not (factor >= 0 and offset == offset):
        raise ValueError(f"draft_suffixes: factor must be at least 0 and offset a number, got {factor} and {offset}")
    found = SuffixDrafts(
        torch.empty(batch, length, dtype=torch.int64, device="cpu"),
        torch.empty(batch, dtype=torch.int64, device="cpu"),
        torch.empty(batch, dtype=torch.float64, device="cpu"),
    )
    handles = torch.tensor([text._handle for text in texts], dtype=torch.int64, device="cpu")
    other = 0 if memory is None else memory._handle
    ops.suffix_draft(handles, other, token_ids, cu_tokens, length, factor, offset, least, *found)
    return found


def _check_index(name: str, given: Any) -> None:
    if not isinstance(given, SuffixIndex):
        raise ValueError(f"{name} must be a SuffixIndex, got {type(given).__name__}")


def _check_ids(where: str, token_ids: Tensor) -> None:
    _check_vector(f"{where}: token_ids", token_ids)
    if token_ids.numel():
        low, high = (int(x) for x in token_ids.aminmax())
        if low < 0 or high >= 1 << 31:
            raise ValueError(f"{where}: token_ids must be in [0, 2^31), got {low if low < 0 else high}")


def _check_vector(name: str, given: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} must be a tensor of int32 or int64, on cpu, got {type(given).__name__}")
    if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64) or given.device.type != "cpu":
        got = f"{given.dtype} {list(given.shape)} on {given.device}"
        raise ValueError(f"{name} must be int32 or int64, of one dimension, on cpu, got {got}")
