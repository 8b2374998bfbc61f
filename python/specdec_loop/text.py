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
        self._limits = lengths + limit
        self._stop = [torch.tensor(sequence, device=device) for sequence in stop]

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
        back = torch.arange(-count, 0, device=self.tokens.device)
        return self.tokens.gather(1, (self.lengths[:, None] + back).clamp(min=0))

    def append(self, token_ids: Tensor, status: Tensor, logprobs: Tensor | None = None) -> Tensor:
        """Take the tokens of a step up to the first stop or the limit; a finished request takes none.

        Args:
            token_ids: ``[batch, width]``, accepted ones and the drawn one, then -1: as the verifiers return them.
            status: int32 ``[batch]``.
            logprobs: of the tokens.

        Returns:
            int32 ``[batch]``: how many were taken.
        """
        offset = torch.arange(token_ids.shape[1], device=token_ids.device)
        place = self.lengths[:, None] + offset
        room = torch.where(self.finished, 0, self._limits - self.lengths)
        offered = (token_ids >= 0) & (offset < room[:, None])
        self.tokens.scatter_(1, place, torch.where(offered, token_ids.long(), -1))
        stops = self._stops(place) & offered
        taken = offered & (stops.cumsum(1) - stops.long() == 0)
        self.tokens.scatter_(1, place, torch.where(taken, token_ids.long(), -1))
        if logprobs is not None:
            self.logprobs.scatter_(1, place, torch.where(taken, logprobs, 0.0))
        count = taken.sum(1)
        self.status |= torch.where(self.finished, 0, status)
        self.finished |= stops.any(1) | (count >= room) | (self.status & BAD_ROW > 0)
        self.lengths += count
        self._steps += 1
        return count.int()

    def _stops(self, place: Tensor) -> Tensor:
        """Whether a stop sequence ends at a place, all of it behind the prompt."""
        found = torch.zeros(place.shape, dtype=torch.bool, device=place.device)
        for sequence in self._stop:
            back = torch.arange(1 - len(sequence), 1, device=place.device)
            at = place[:, :, None] + back
            window = self.tokens.gather(1, at.clamp(min=0).flatten(1)).view_as(at)
            found |= (window == sequence).all(-1) & (at[:, :, 0] >= self.prompt_lengths[:, None])
        return found

    def read(self, token_ids: Tensor, *counts: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Bring the step's tokens, and counts ``[batch]`` of interest, to the host: one copy, the one wait of a step.

        Args:
            token_ids: what was offered to `append`.
            counts: the first is what `append` returned.

        Returns:
            The new tokens of each request; and of each of the counts, its value for every request.
        """
        packed = torch.cat([torch.stack([c.long() for c in counts], 1), token_ids.long()], 1).tolist()
        numbers = [list(column) for column in zip(*(row[: len(counts)] for row in packed), strict=True)]
        new = [row[len(counts) :][:taken] for row, taken in zip(packed, numbers[0], strict=True)]
        for row, tokens in zip(self.rows, new, strict=True):
            row += tokens
        return new, numbers
