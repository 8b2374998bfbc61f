"""The texts of a batch while they grow: on the device for the ops, and on the host after each step's one read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec_kernels import RngKey, Status

from .stops import Stops

BAD_ROW = int(Status.BAD_TARGET)  # a target row that gave no token; an int: `&` of enums takes a microsecond
MOST_KEPT = 1 << 18  # numbers of a `OffsetTable`


class Sequences:
    """Committed tokens of each request, and which requests are finished. Only `read` waits for the device.

    The device appends up to the limit and no further. A stop is found by the host when it reads: `rows` end there, and
    the device, which may hold tokens behind it, is told to append no more.

    Attributes:
        tokens: int64 ``[batch, columns]``, prompt and what followed, from column 0 on; -1 behind it.
        logprobs: float32 ``[batch, columns]``, 0 at the prompt.
        rows: tokens of each text as lists on the host, up to the last `read` and to a stop.
        ends: what `lengths` holds, on the host.
        prompts: tokens of each prompt.
        status: of each request, bits of all its steps; that of a bad target row only where the text came to it.
        steps: calls of `append` so far.
        first: position behind the longest prompt.
        room: more tokens than may follow it.
        is_finished: of each request: a stop came, the limit is reached, or the target's row was bad.
    """

    def __init__(
        self,
        prompts: Tensor,
        lengths: Tensor,
        *,
        seed: Tensor,
        limits: Sequence[int],
        stops: Sequence[Stops],
        overhang: int,
    ) -> None:
        """Take prompts padded on the right.

        Args:
            prompts: int64 ``[batch, longest]``.
            lengths: int64 ``[batch]``, at least 1.
            seed: int64 ``[batch]``.
            limits: most tokens that may be appended to each prompt.
            stops: of each request: end its text where they occur in it behind the prompt.
            overhang: most tokens that one `append` may offer.
        """
        batch, longest = prompts.shape
        device, limit = prompts.device, max(limits)
        self.tokens = torch.full((batch, longest + limit + overhang), -1, dtype=torch.int64, device=device)
        inside = torch.arange(longest, device=device) < lengths[:, None]
        self.tokens[:, :longest] = torch.where(inside, prompts, -1)
        self._lengths: Tensor | None = lengths.clone()
        self.logprobs = torch.zeros(self.tokens.shape, dtype=torch.float32, device=device)
        self.prompts: list[int] = lengths.tolist()
        self.ends = list(self.prompts)
        self.rows: list[list[int]] = [row[:n] for row, n in zip(prompts.tolist(), self.ends, strict=True)]
        self.status, self.is_finished = [0] * batch, [False] * batch
        self._seed, self.steps, self.first, self.room = seed, 0, max(self.prompts), limit + overhang
        self._step = OffsetTable(torch.zeros_like(seed), self.room)
        self._place = OffsetTable(torch.full_like(seed, self.first), self.room)
        self._end = self._common_end()  # of every text; None: they differ, or the host does not know
        self._most = [start + limit for start, limit in zip(self.prompts, limits, strict=True)]  # tokens at the end
        self._stops = list(stops)
        self._last_place = torch.tensor(self._most, device=device) - 1  # where a token may stand
        self._offsets = torch.arange(overhang, device=device)
        self._positions: Tensor | None = None  # int64 [overhang, batch]: of the next tokens
        self._before, self._followers = lengths, torch.zeros_like(lengths)  # lengths before a step, and what it added

    @classmethod
    def joined(cls, texts: Sequence[tuple[Sequences, int]], overhang: int) -> Sequences:
        """One batch of texts of others, each named by its batch and number, that go on from here."""
        lengths = [text.ends[b] for text, b in texts]
        new = cls(
            pad_sequence([text.tokens[b, :n] for (text, b), n in zip(texts, lengths, strict=True)], batch_first=True),
            torch.tensor(lengths, device=texts[0][0].tokens.device),
            seed=torch.stack([text._seed[b] for text, b in texts]),
            limits=[text._left(b) for text, b in texts],
            stops=[text._stops[b] for text, b in texts],
            overhang=overhang,
        )
        for i, (text, b) in enumerate(texts):
            new.prompts[i], new.rows[i], new.status[i] = text.prompts[b], text.rows[b], text.status[b]
            new.logprobs[i, : lengths[i]] = text.logprobs[b, : lengths[i]]
        return new

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.rows)

    @property
    def lengths(self) -> Tensor:
        """int64 ``[batch]``; also the position of the next token."""
        if self._lengths is None:  # a sum costs 10 us of a step, and is not wanted where all texts end together
            self._lengths = self._before + (self._followers + 1)
        return self._lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(self.ends)

    @property
    def running(self) -> list[int]:
        """Requests that are not finished."""
        return [b for b, is_finished in enumerate(self.is_finished) if not is_finished]

    @property
    def slowest(self) -> list[int]:
        """Running requests that have most tokens to go, within a tenth."""
        most = self.left
        return [b for b in self.running if 10 * self._left(b) >= 9 * most]

    @property
    def left(self) -> int:
        """Most tokens that a running request has to go."""
        return max(map(self._left, self.running), default=0)

    def _left(self, b: int) -> int:
        return self._most[b] - len(self.rows[b])

    def rng(self, ahead: int = 0) -> RngKey:
        """Names the random numbers of the token `ahead` of the next one: keyed by its absolute position."""
        return RngKey(self._seed, self._position(ahead), self._step[self.steps])

    def _position(self, ahead: int) -> Tensor:
        if ahead == 0:
            return self.lengths
        place = self.place(ahead)
        if place is not None:
            return self._place[place]
        if self._positions is None:  # one sum a step, not one a token ahead
            self._positions = self.lengths + self._offsets[:, None]
        return self._positions[ahead]

    def place(self, ahead: int) -> int | None:
        """How far behind `first` the token `ahead` of the next one is; None where the host knows no such number."""
        return None if self._end is None else self._end - self.first + ahead

    def last(self, count: int) -> Tensor:
        """The last tokens, ``[batch, count]``; where a text is shorter its first token is repeated in front."""
        if self._end is not None and count <= self._end:
            return self.tokens.narrow(1, self._end - count, count)
        place = (self.lengths - count)[:, None]
        if count > 1:
            place = (place + torch.arange(count, device=place.device)).clamp(min=0)
        return self.tokens.gather(1, place)

    def append(self, token_ids: Tensor, num_accepted: Tensor, logprobs: Tensor | None = None) -> Tensor:
        """Take the tokens of a step up to the limit; a finished request takes none. Then `read`.

        Args:
            token_ids: int64 ``[batch, width]``, accepted ones and the drawn one, then -1: as the verifiers return them.
            num_accepted: int32 ``[batch]``.
            logprobs: of the tokens.

        Returns:
            int32 ``[batch]``: how many were taken but for the last, which was drawn and may be the -1 of a bad row; -1:
            none was, the request is finished.
        """
        width, followers = token_ids.shape[1], num_accepted
        if not self._is_roomy(width):
            token_ids = torch.where(self._places(width) > self._last_place[:, None], -1, token_ids)
            followers = (self._last_place - self.lengths).clamp(min=-1).minimum(num_accepted).int()
        self._write(self.tokens, token_ids)
        if logprobs is not None:
            self._write(self.logprobs, logprobs.masked_fill(token_ids < 0, 0.0))
        self._before, self._followers, self._lengths, self._positions = self.lengths, followers, None, None
        self.steps, self._end = self.steps + 1, None
        return followers

    def _is_roomy(self, width: int) -> bool:
        """Whether the host knows that every request takes so many tokens."""
        rooms = zip(self.ends, self._most, self.is_finished, strict=True)
        return not any(is_finished or end + width > most for end, most, is_finished in rooms)

    def _places(self, width: int) -> Tensor:
        """Columns behind each text."""
        return self.lengths[:, None] + self._offsets[:width]

    def _write(self, columns: Tensor, values: Tensor) -> None:
        """Put values behind each text."""
        width = values.shape[1]
        if self._end is not None:
            columns.narrow(1, self._end, width).copy_(values)
        else:
            columns.scatter_(1, self._places(width), values)

    def _common_end(self) -> int | None:
        """Where all texts end, if at the same place."""
        return self.ends[0] if self.ends.count(self.ends[0]) == len(self.ends) else None

    def read(self, token_ids: Tensor, status: Tensor, *columns: Tensor) -> tuple[list[list[int]], list[Any]]:
        """Bring what a step gave to the host, in one copy: the one wait of a step.

        Args:
            token_ids: what was offered to `append`.
            status: int32 ``[batch]``, of this step.
            columns: ``[batch]`` or ``[batch, n]`` each; the first is what `append` returned.

        Returns:
            The new tokens of each request; and of each of the columns, an int or a list of ints for every request.
        """
        ids, states, followers, *_ = found = on_host(token_ids, status, *columns)
        return self.take(ids, states, followers), found[2:]

    def take(self, ids: list[list[int]], states: list[int], followers: list[int]) -> list[list[int]]:
        """Take what a step gave where the host has it already; returns the new tokens of each request.

        Args:
            ids: what was offered to `append`.
            states: of each request, the status of this step.
            followers: what `append` returned.
        """
        new = [self._grow(b, states[b], ids[b][: followers[b] + 1]) for b in range(self.batch)]
        self._end = self._common_end()
        if self._end is not None:
            self._lengths = self._place[self._end - self.first]
        return new

    def finish(self, b: int, length: int) -> None:
        """End a text, behind its first `length` tokens."""
        if length < len(self.rows[b]):
            self.status[b] &= ~BAD_ROW  # such a row lies behind them
        del self.rows[b][length:]
        self.is_finished[b] = True
        self._last_place[b] = -1

    def _grow(self, b: int, status: int, tokens: list[int]) -> list[int]:
        """Take what the device appended to a text, up to a stop; returns that."""
        if self.is_finished[b]:
            return []
        row, before = self.rows[b], len(self.rows[b])
        self.ends[b] += len(tokens)
        row += [token for token in tokens if token >= 0]  # a bad row gave none
        end = self._stops[b].end(row[self.prompts[b] :], before - self.prompts[b]) if tokens else None
        is_bad = bool(tokens) and tokens[-1] < 0 and end is None  # else the text ends before the row, if one was bad
        self.status[b] |= status if is_bad else status & ~BAD_ROW
        if end is not None:
            self.finish(b, self.prompts[b] + end)
        elif is_bad or len(row) >= self._most[b]:
            self.finish(b, len(row))
        return row[before:]


class OffsetTable:
    """A vector plus 0, 1, 2, ...: the first sums are made once; on cold caches an addition costs 10 us of a step."""

    def __init__(self, base: Tensor, count: int) -> None:
        """Make so many, but no more than a few megabytes."""
        kept = max(min(count, MOST_KEPT // base.numel()), 1)
        self._sums = (base + torch.arange(kept, device=base.device)[:, None]).unbind()

    def __getitem__(self, i: int) -> Tensor:
        """The vector plus i."""
        return self._sums[i] if i < len(self._sums) else self._sums[0] + i


def on_host(*columns: Tensor) -> list[list[Any]]:
    """Columns ``[batch]`` or ``[batch, n]`` as lists, in one copy from the device."""
    if columns[0].device.type == "cpu":  # nothing waits: they need not be brought together
        return [column.tolist() for column in columns]
    blocks = [c if c.dim() > 1 else c[:, None] for c in columns]
    rows, found, end = torch.cat(blocks, 1).tolist(), [], 0
    for block, column in zip(blocks, columns, strict=True):
        begin, end = end, end + block.shape[1]
        found.append([row[begin] if column.dim() == 1 else row[begin:end] for row in rows])
    return found


def common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count
