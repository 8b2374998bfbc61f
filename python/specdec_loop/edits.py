"""Edits of a batch of texts as they grow: the parameters of each request, and counts of their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import Edits, TokenCounts, count_tokens

from .sequences import Sequences


class TextEdits:
    """`Edits` whose counts, tail and tokens left to `min_tokens` are those of growing sequences.

    Drafters draw without edits, and their own distributions are verified: the texts follow the target's with edits.
    """

    def __init__(self, edits: Edits, sequences: Sequences, prompts: Tensor | None = None) -> None:
        """Count the prompts.

        Args:
            edits: what each request asks for; `min_tokens` counts new tokens. `counts`, `slots`, `tail` are kept here.
            sequences: the texts, of which nothing but prompts is there yet.
            prompts: int64 ``[batch, columns]`` that count as prompts, -1 padded; None: those of the sequences.

        Raises:
            ValueError: counts, slots or a tail are given.
        """
        if edits.counts.token_ids is not None or edits.slots is not None or edits.tail is not None:
            raise ValueError("specdec_loop: edits must have no counts, slots and tail: they follow the texts")
        self._edits, device = edits, sequences.tokens.device
        self._length = 0 if edits.bad_words is None else edits.bad_words.shape[2]
        self._prompts = torch.tensor(sequences.prompts, device=device)
        self._counts: TokenCounts | None = None
        if edits.has_penalties:
            known = sequences.tokens[:, : max(sequences.prompts)] if prompts is None else prompts
            self._counts = TokenCounts.empty(sequences.batch, known.shape[1] + sequences.room, device=device)
            count_tokens(self._counts, known.contiguous(), is_prompt=True)

    def now(self, sequences: Sequences) -> Edits:
        """Edits with counts, tail and `min_tokens` of the texts so far."""
        edits, device = self._edits, sequences.tokens.device
        if self._counts is not None:
            edits = edits._replace(counts=self._counts)
        if edits.min_tokens is not None:
            edits = edits._replace(min_tokens=(edits.min_tokens - (sequences.lengths - self._prompts)).int())
        if self._length > 1:
            place = sequences.lengths[:, None] - torch.arange(self._length - 1, 0, -1, device=device)
            tail = torch.where(place >= 0, sequences.tokens.gather(1, place.clamp(min=0)), -1)
            edits = edits._replace(tail=tail.int())
        return edits

    def grown(self, token_ids: Tensor) -> None:
        """Count what a step emitted, ``[batch, width]``, -1 behind the last."""
        if self._counts is not None:
            count_tokens(self._counts, token_ids)
