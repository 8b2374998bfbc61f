"""One layer of a `TreeCache`, and what all of them share: how long each request is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class Lengths:
    """How many tokens of each request are committed: exact on the device, bounded on the host."""

    def __init__(self, batch: int, capacity: int, device: torch.device | str) -> None:
        """Begin with empty requests."""
        self.batch, self.capacity, self.device = batch, capacity, torch.empty(0, device=device).device
        self.layers = 0  # that have buffers
        self.longest = 0  # no length exceeds it
        self.announced = -1  # rows that were written when a forward was given positions and a mask
        self.is_even = True  # the host knows that every length is `longest`
        self.is_on_host = self.device.type == "cpu"  # reading waits for nobody
        self._is_loose = False  # reading may tell more
        self._slots: tuple[int, int, Tensor] | None = None  # of this forward: every layer asks for the same
        self._rows: tuple[int, Tensor] | None = None  # the same, of so many heads
        self._exact: Tensor | None = None  # even ones are made when somebody asks: most steps do without

    @property
    def exact(self) -> Tensor:
        """int64 ``[batch]``."""
        if self._exact is None:
            self._exact = torch.full((self.batch,), self.longest, dtype=torch.int64, device=self.device)
        return self._exact

    @exact.setter
    def exact(self, lengths: Tensor) -> None:
        self._exact = lengths

    def grow(self, rows: int) -> None:
        """Every request keeps so many more."""
        self._exact = None if self.is_even else self.exact + rows
        self.changed(self.longest + rows, is_even=self.is_even, is_exact=self.is_even)

    def slots(self, written: int, tokens: int) -> Tensor:
        """Slots [batch, tokens] of the rows that a forward adds."""
        if self._slots is None or self._slots[:2] != (written, tokens):
            offsets = torch.arange(written, written + tokens, device=self.device)
            self._slots, self._rows = (written, tokens, self.exact[:, None] + offsets), None
        return self._slots[2]

    def with_rows(self, written: int) -> int:
        """Rows in the cache, where that is one number; those of the longest request for a forward that has positions.

        Some models ask before they look at the positions and the mask that they were given.
        """
        self.tighten()
        if not self.is_even and self.announced != written:
            raise ValueError(
                "TreeCache: requests have lengths of their own: call the model with chain_inputs or tree_inputs, which "
                "give it position_ids and a 4-D attention_mask"
            )
        return self.longest + written

    def reach(self, rows: int) -> int:
        """Slots that so many rows behind what is committed may reach.

        Reads the lengths only where their bound exceeds the capacity.
        """
        self.tighten()
        if self.longest + rows > self.capacity and not self.is_even:
            self.read()
        if self.longest + rows > self.capacity:
            need = f"at least {self.longest + rows} for {rows} tokens that are not committed (or commit, crop, reset)"
            fail("capacity", need, self.capacity)
        return self.longest + rows

    def rows(self, written: int, tokens: int, heads: int) -> Tensor:
        """The same slots of every head, int64 ``[batch * heads * tokens]``, as rows of a buffer."""
        slots = self.slots(written, tokens)
        if self._rows is None or self._rows[0] != heads:
            head = torch.arange(self.batch * heads, device=self.device).view(self.batch, heads, 1)
            self._rows = heads, (head * self.capacity + slots[:, None]).flatten()
        return self._rows[1]

    def changed(self, longest: int, *, is_even: bool, is_exact: bool = False) -> None:
        """Note what is known of new lengths."""
        self.longest, self.is_even, self._slots = longest, is_even, None
        self._is_loose = self.is_on_host and not is_exact

    def tighten(self) -> None:
        """Read them if that costs nothing and nobody has told them."""
        if self._is_loose:
            self.read()

    def read(self) -> None:
        """Wait for the device and learn them."""
        shortest, longest = torch.stack(self.exact.aminmax()).tolist()
        self.changed(longest, is_even=shortest == longest, is_exact=True)


class TreeLayer(CacheLayerMixin):  # type: ignore[misc] # transformers has no types
    """Keys and values of one layer. A sliding window is the mask's affair: rows behind it may be needed again."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, lengths: Lengths, dtype: torch.dtype) -> None:
        """Share the lengths; the buffers are made when the first keys tell their heads and dims."""
        super().__init__()
        self.lengths, self.dtype = lengths, dtype
        self.batch_size, self.device = lengths.batch, lengths.device
        self.written = 0  # rows since the last commit

    @torch.inference_mode(mode=False)  # they may outlive it
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers."""
        self.keys, self.values = (
            torch.zeros(
                self.batch_size, s.shape[1], self.lengths.capacity, s.shape[3], dtype=self.dtype, device=self.device
            )
            for s in (key_states, value_states)
        )
        self.is_initialized = True
        self.lengths.layers += 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new rows behind those of each request; views of all that may be attended."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[-2]
        end, lengths, heads = self.lengths.reach(self.written + tokens), self.lengths, self.keys.shape[1]
        rows = None if lengths.is_even else lengths.rows(self.written, tokens, heads)
        for name, states, buffer in (("keys", key_states, self.keys), ("values", value_states, self.values)):
            self._check(name, states, (buffer.shape[0], buffer.shape[1], tokens, buffer.shape[3]))
            if rows is None:
                buffer.narrow(2, end - tokens, tokens).copy_(states)
            else:
                buffer.view(-1, buffer.shape[3]).index_copy_(0, rows, states.reshape(-1, buffer.shape[3]))
        self.written += tokens
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def take(self, parts: Sequence[tuple[TreeLayer, Tensor]]) -> None:
        """Copy the rows of requests of other layers."""
        first = 0
        for other, numbers in parts:
            longest = min(other.lengths.longest, self.lengths.capacity)  # the longest may be one that is not taken
            if other.is_initialized:
                if not self.is_initialized:
                    self.lazy_initialization(other.keys, other.values)
                for own, rows in ((self.keys, other.keys), (self.values, other.values)):
                    own[first : first + len(numbers), :, :longest] = rows[:, :, :longest].index_select(0, numbers)
            first += len(numbers)

    def _check(self, name: str, states: Tensor, shape: tuple[int, ...]) -> None:
        if states.shape != shape:
            fail(name, f"{list(shape)} [batch, head, token, dim]", list(states.shape))
        if states.dtype != self.dtype:
            fail(name, f"{self.dtype}, the dtype of the cache", states.dtype)
        if states.device != self.device:
            fail(name, f"on {self.device}, the device of the cache", states.device)
        if states.requires_grad:
            fail(name, "without gradient: the cache is inference only (use torch.no_grad())", "requires_grad")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width of a mask and its first slot."""
        return self.lengths.reach(self.written + query_length), 0

    def get_seq_length(self) -> int:
        """See `Lengths.with_rows`."""
        return self.lengths.with_rows(self.written)

    def get_max_length(self) -> int:
        """Slots of a request."""
        return self.lengths.capacity

    def reset(self) -> None:
        """Forget every row."""
        self.written = 0
        if self.is_initialized:
            self.keys.zero_()
            self.values.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give request b the rows of request beam_idx[b]."""
        if self.is_initialized:
            self.keys.copy_(self.keys[beam_idx])
            self.values.copy_(self.values[beam_idx])


def fail(name: str, expected: str, got: object) -> NoReturn:
    """Refuse an argument."""
    raise ValueError(f"TreeCache: {name} must be {expected}, got {got}")


def is_in_place(path: Tensor, num_accepted: list[int], written: int) -> bool:
    """Whether accepted nodes follow the root as those of a chain do: their rows need not be moved (60 us of a step)."""
    if path.dtype not in (torch.int32, torch.int64) or path.dim() != 2 or path.shape[0] != len(num_accepted):
        return False
    most = min(path.shape[1], written - 1)
    return all(
        -1 <= n <= most and row[: max(n, 0)] == list(range(1, n + 1))
        for n, row in zip(num_accepted, path.tolist(), strict=True)
    )
