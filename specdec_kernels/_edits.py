"""What a request asks of its logits before they are sampled: biases, penalties, bans; kept sparse. Plain PyTorch.

`Edits` speaks of requests, `TokenCounts` of the tokens they have so far, `RowEdits` of rows: the logits that differ
from the model's, by id, which every op on rows reads in place of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64  # ids of a word of bits
MAX_VOCAB = (1 << 23) - 1  # one logit more, all equal, would weigh 2^63 units; `RowEdits` holds ids as float32


class TokenCounts(NamedTuple):
    """How often each id stands in the text of each slot: hash tables on the device, as large as their distinct ids.

    Written by `count_tokens` alone. A request's slot is its row; `slots` of `Edits` may name another one.

    Attributes:
        token_ids: int32 ``[slots, capacity]``, -1 where there is none; capacity is a power of two.
        token_counts: int32 ``[slots, capacity]``: twice how often an id was generated, plus 1 where the prompt has it.
    """

    token_ids: Tensor | None = None
    token_counts: Tensor | None = None

    @classmethod
    def empty(cls, slots: int, distinct: int, *, device: torch.device | str = "cpu") -> TokenCounts:
        """Tables of empty texts with room for so many distinct ids each; half of a table stays free.

        Raises:
            ValueError: a number that is no int of at least 0.
        """
        for name, value in (("slots", slots), ("distinct", distinct)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"TokenCounts.empty: {name} must be an int >= 0, got {value!r}")
        capacity = 1 << max(2 * distinct - 1, 1).bit_length()
        return cls(
            torch.full((slots, capacity), -1, dtype=torch.int32, device=device),
            torch.zeros((slots, capacity), dtype=torch.int32, device=device),
        )

    def of(self, slot: int) -> dict[int, tuple[int, bool]]:
        """What a slot holds: id -> (times generated, whether the prompt has it), by id; waits for the device."""
        token_ids, token_counts = self._tables("of")
        pairs = zip(token_ids[slot].tolist(), token_counts[slot].tolist(), strict=True)
        return {id: (count >> 1, count & 1 == 1) for id, count in sorted(pairs) if id >= 0 and count}

    def clear(self, slots: Tensor) -> None:
        """Empty some slots, int32 or int64 [n], -1: none: their requests ended."""
        token_ids, token_counts = self._tables("clear", slots=slots)
        if len(slots) and len(token_ids):
            places, has_any = _without_padding(slots >= 0, slots)
            for table, empty in ((token_ids, -1), (token_counts, 0)):
                table.index_copy_(0, places, torch.where(has_any, empty, table[places]))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to slots `target`, int32 or int64 [n] each, -1: none: a request moves, or forks."""
        token_ids, token_counts = self._tables("copy", source=source, target=target)
        if len(source) and len(token_ids):
            here, there, _ = _without_padding((source >= 0) & (target >= 0), source, target)
            for table in (token_ids, token_counts):
                table.index_copy_(0, there, table[here])

    def _tables(self, method: str, **places: Tensor) -> tuple[Tensor, Tensor]:
        """Both tensors of a method that is called for these slots."""
        if self.token_ids is None or self.token_counts is None:
            raise ValueError(f"TokenCounts.{method}: it has no tables (see TokenCounts.empty)")
        for name, value in places.items():
            if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
                got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"TokenCounts.{method}: {name} must be a tensor of int32 or int64 [n], got {got}")
        if len({len(value) for value in places.values()}) > 1:
            raise ValueError(f"TokenCounts.{method}: {' and '.join(places)} must be equally many")
        return self.token_ids, self.token_counts


def _without_padding(is_slot: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
    """Slots with the first that count in place of those that do not, 0 where none does; and whether any counts."""
    first, has_any = is_slot.int().argmax(0, keepdim=True), is_slot.any()
    kept = (torch.where(is_slot, s, torch.where(has_any, s.gather(0, first), 0)).long() for s in slots)
    return *kept, has_any


class Edits(NamedTuple):
    """What each request changes of its logits; each is a tensor or None (off).

    Applied to raw float32 logits, before temperature, in this order: bias, repetition, frequency and presence penalty,
    bans. So do vLLM and transformers. Ids outside the vocabulary (-1 pads) are skipped. Allowed ids go into `allowed`.

    Attributes:
        bias_ids: int32 ``[batch, n]``, the ids of a request all different.
        bias: float32 ``[batch, n]``, added to their logits; -inf bans an id.
        repetition: float32 ``[batch]``: logits of ids in prompt or output are divided by it where positive, else
            multiplied; 1 is off.
        frequency: float32 ``[batch]``: taken from a logit for each time its id was generated; 0 is off.
        presence: float32 ``[batch]``: taken from it where it was generated at all; 0 is off.
        counts: the tokens so far, for the three penalties; the drafts before a row are counted on top of them.
        slots: int32 ``[batch]``: slot of `counts` of each request, a number without a slot: no text; None: its row.
        stop_ids: int32 ``[batch, n]``: ids that may not come yet.
        min_tokens: int32 ``[batch]``: how many tokens must still come before one of `stop_ids`.
        bad_words: int32 ``[batch, words, length]``, each padded with -1 on its left: its last id is banned where the
            rest stands before it.
        tail: int32 ``[batch, length - 1]`` or more: the last tokens of the text, padded with -1 on the left.
    """

    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    repetition: Tensor | None = None
    frequency: Tensor | None = None
    presence: Tensor | None = None
    counts: TokenCounts = TokenCounts()
    slots: Tensor | None = None
    stop_ids: Tensor | None = None
    min_tokens: Tensor | None = None
    bad_words: Tensor | None = None
    tail: Tensor | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty looks at the tokens so far."""
        return self.repetition is not None or self.frequency is not None or self.presence is not None

    def flat(self) -> tuple[Tensor | None, ...]:
        """Its tensors as arguments of an operator."""
        return (*self[:5], *self.counts, *self[6:])

    def room(self, drafts: int) -> int:
        """Most ids of a row behind so many drafts that these edits can change."""
        lists = [part.shape[1] for part in (self.bias_ids, self.stop_ids, self.bad_words) if part is not None]
        if self.has_penalties:
            lists.append(drafts)
            if self.counts.token_ids is not None:
                lists.append(self.counts.token_ids.shape[1])
        return sum(lists)


class RowEdits(NamedTuple):
    """How the logits of some rows change, by id: what `edit_rows` returns, and ops on rows take as `edits`.

    A logit l of an id that is listed becomes l + bias, then is divided by the repetition penalty where positive and
    multiplied by it elsewhere, then loses `minus`; a bias of -inf bans the id whatever l is.

    Attributes:
        edit_bits: int64 ``[rows, ceil(vocab / 64)]``: bit v % 64 of word v // 64 says that id v is listed.
        edit_start: int32 ``[rows, ceil(vocab / 64) + 1]``: how many are listed before those of each word.
        edit_values: float32 ``[4, rows, room]``: bias, repetition penalty, minus and id of what is listed, by id; what
            lies behind the last one is undefined.
    """

    edit_bits: Tensor | None = None
    edit_start: Tensor | None = None
    edit_values: Tensor | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Float32 copy of rows [rows, vocab], edited: for tests and for code that wants dense rows."""
        logits = logits.float()
        if self.edit_bits is None or self.edit_start is None or self.edit_values is None:
            return logits
        listed = unpacked(self.edit_bits, logits.shape[1])
        rank = (listed.cumsum(1) - 1).clamp(min=0)
        values = torch.nn.functional.pad(self.edit_values, (0, 1))  # a row may have no room at all
        bias, repetition, minus = (plane.gather(1, rank) for plane in values[:3])
        changed = logits + bias
        changed = torch.where(changed > 0, changed / repetition, changed * repetition) - minus
        changed = torch.where(bias == -float("inf"), bias, changed)
        return torch.where(listed, changed, logits)

    def pick(self, choose: Callable[[Tensor], Tensor]) -> RowEdits:
        """The edits of some rows: `choose` takes a tensor [rows, ...]."""
        if self.edit_bits is None or self.edit_start is None or self.edit_values is None:
            return self
        values = choose(self.edit_values.transpose(0, 1)).transpose(0, 1).contiguous()
        return RowEdits(choose(self.edit_bits), choose(self.edit_start), values)


HASH = 2654435761  # Knuth's multiplier: an id's first place in a table are the high bits of the product


def place_of(table: Tensor, token: int) -> int | None:
    """Where a token stands in a slot's table [capacity], or would: None where the table is full of others."""
    capacity = len(table)
    first = (token * HASH & 0xFFFFFFFF) >> (33 - capacity.bit_length())
    for step in range(capacity):
        place = (first + step) % capacity
        if int(table[place]) in (-1, token):
            return place
    return None


def unpacked(bits: Tensor, width: int) -> Tensor:
    """Words of 64 bits [rows, words] as bool [rows, width]."""
    lane = torch.arange(BLOCK, device=bits.device)
    touched = ((bits[:, :, None] >> lane & 1) == 1).flatten(1)
    return torch.nn.functional.pad(touched, (0, width - touched.shape[1]))


def packed(listed: Tensor, planes: Tensor, room: int) -> RowEdits:
    """`RowEdits` of the ids that are listed, bool [rows, vocab], with their numbers, float32 [3, rows, vocab]."""
    rows, vocab = listed.shape
    words = -(-vocab // BLOCK)
    by_word = torch.nn.functional.pad(listed, (0, words * BLOCK - vocab)).unflatten(1, (words, BLOCK))
    bits = (by_word.long() << torch.arange(BLOCK, device=listed.device)).sum(2)
    start = torch.nn.functional.pad(by_word.sum(2).cumsum(1), (1, 0)).int()
    ids = torch.arange(vocab, dtype=planes.dtype, device=listed.device).expand(1, rows, vocab)
    planes = torch.cat([planes, ids])
    rank = torch.where(listed, listed.cumsum(1) - 1, room).expand_as(planes)
    values = planes.new_zeros(4, rows, room + 1).scatter(2, rank, planes)[:, :, :room]
    return RowEdits(bits, start, values.contiguous())
