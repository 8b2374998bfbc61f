"""The texts of a batch while they grow: on the device for the ops, and on the host after each step's one read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import Noise

BAD_ROW = 1  # status bit: a target row from which no token could be drawn


class Text:
    """Committed tokens of each request, and which requests are finished. Only `read` waits for the device.

    Attributes:
        tokens: int64 ``[batch, columns]``, prompt and what followed, from column 0 on; -1 behind it.
        lengths: int64 ``[batch]``; also the position of the next token.
        finished: bool ``[batch]``: a stop sequence came, the limit is reached, or the target's row was bad.
        logprobs: float32 ``[batch, columns]``, 0 at the prompt.
        status: int32 ``[batch]``, bits of all steps so far.
        rows: the same tokens as lists on the host, up to the last `read`.
    """

    def __init__(
        self,
        prompts: Tensor,
        lengths: Tensor,
        *,
        seed: Tensor,
        limit: int,
        stop: Sequence[Sequence[int]],
        overhang: int,
    ) -> None:
        """Take prompts padded on the right.

        Args:
            prompts: int64 ``[batch, longest]``.
            lengths: int64 ``[batch]``, at least 1.
            seed: int64 ``[batch]``.
            limit: most tokens that may be appended to a prompt.
            stop: token sequences, each of which ends a text that it occurs in behind the prompt.
            overhang: most tokens that one `append` may offer.
        """
        batch, longest = prompts.shape
        device = prompts.device
        self.tokens = torch.full((batch, longest + limit + overhang), -1, dtype=torch.int64, device=device)
        inside = torch.arange(longest, device=device) < lengths[:, None]
        self.tokens[:, :longest] = torch.where(inside, prompts, -1)
        self.prompt_lengths, self.lengths = lengths, lengths.clone()
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.status = torch.zeros(batch, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(self.tokens.shape, device=device)
        self.rows = [row[:n] for row, n in zip(prompts.tolist(), lengths.tolist(), strict=True)]
        self._seed, self._steps = seed, torch.zeros_like(seed)
        self._limits = lengths + limit  # that of a finished request is its length
        self._offsets = torch.arange(max(overhang, 2), device=device)
        ids = [sequence[0] for sequence in stop if len(sequence) == 1]
        self._stop_ids = torch.tensor(ids, dtype=torch.int64, device=device) if ids else None
        self._stop_sequences = [torch.tensor(sequence, device=device) for sequence in stop if len(sequence) > 1]

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest text, as of the last `read`."""
        return max(map(len, self.rows))

    def noise(self, ahead: int = 0) -> Noise:
        """Names the random numbers of the token `ahead` of the next one: keyed by its absolute position."""
        return Noise(self._seed, self.lengths + ahead, self._steps)

    def last(self, count: int) -> Tensor:
        """The last tokens, ``[batch, count]``; where a text is shorter its first token is repeated in front."""
        place = (self.lengths - count)[:, None]
        if count > 1:
            place = (place + torch.arange(count, device=place.device)).clamp(min=0)
        return self.tokens.gather(1, place)

    def append(self, token_ids: Tensor, status: Tensor, logprobs: Tensor | None = None) -> Tensor:
        """Take the tokens of a step up to the first stop or the limit; a finished request takes none.

        Args:
            token_ids: int64 ``[batch, width]``, accepted ones and the drawn one, then -1: as the verifiers return them.
            status: int32 ``[batch]``.
            logprobs: of the tokens.

        Returns:
            int32 ``[batch]``: how many were taken.
        """
        place = self.lengths[:, None] + self._offsets[: token_ids.shape[1]]
        taken = (token_ids >= 0) & (place < self._limits[:, None])
        is_over = status & BAD_ROW > 0
        if self._stop_ids is not None or self._stop_sequences:
            stops = self._stops(token_ids, place, taken)
            taken &= stops.cumsum(1) == stops  # there is no other stop before
            is_over |= (stops & taken).any(1)
        self.tokens.scatter_(1, place, torch.where(taken, token_ids, -1))
        if logprobs is not None:
            self.logprobs.scatter_(1, place, torch.where(taken, logprobs, 0.0))
        count = taken.sum(1, dtype=torch.int32)
        self.status |= status.masked_fill(self.finished, 0)
        self.lengths += count
        self._limits = torch.where(is_over, self.lengths, self._limits)
        self.finished = self.lengths >= self._limits
        self._steps += 1
        return count

    def _stops(self, token_ids: Tensor, place: Tensor, offered: Tensor) -> Tensor:
        """Whether a stop sequence ends at a place, all of it behind the prompt."""
        found = torch.zeros_like(offered)
        if self._stop_ids is not None:
            found = offered & (token_ids[:, :, None] == self._stop_ids).any(-1)
        if self._stop_sequences:
            self.tokens.scatter_(1, place, torch.where(offered, token_ids, -1))
        for sequence in self._stop_sequences:
            at = place[:, :, None] + torch.arange(1 - len(sequence), 1, device=place.device)
            window = self.tokens.gather(1, at.clamp(min=0).flatten(1)).view_as(at)
            found |= offered & (window == sequence).all(-1) & (at[:, :, 0] >= self.prompt_lengths[:, None])
        return found

    def read(self, token_ids: Tensor, *counts: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Bring the step's tokens, and counts ``[batch]`` of interest, to the host: one copy, the one wait of a step.

        Args:
            token_ids: what was offered to `append`.
            counts: the first is what `append` returned.

        Returns:
            The new tokens of each request; and of each of the counts, its value for every request.
        """
        packed = torch.cat([*(c[:, None] for c in counts), token_ids], 1).tolist()
        numbers = [list(column) for column in zip(*(row[: len(counts)] for row in packed), strict=True)]
        new = [row[len(counts) :][:taken] for row, taken in zip(packed, numbers[0], strict=True)]
        for row, tokens in zip(self.rows, new, strict=True):
            row += tokens
        return new, numbers
