"""Biases, penalties and bans of a batch of vLLM's requests, exact at every drafted position.

vLLM's order is that of `Edits`: bias, repetition, frequency and presence penalty; its bans (allowed ids, stop ids
before min_tokens, bad words) commute with these. Counts follow the tokens on the device: the host need not know them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Edits, TokenCounts, count_tokens

LONGEST = 64  # tokens of a bad word; requests with longer ones are vLLM's
ROOM = 1024  # distinct ids of a text at first: tables grow with the texts, not with what the model could take


def has_penalties(params: Any) -> bool:
    """Whether a penalty looks at the text."""
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


def needs_text(params: Any) -> bool:
    """Whether what a request changes depends on its tokens so far."""
    return has_penalties(params) or bool(params.bad_words_token_ids)


def changes_rows(params: Any) -> bool:
    """Whether a request changes logits at all."""
    return needs_text(params) or bool(params.logit_bias or params.min_tokens or params.allowed_token_ids)


def reason_against(params: Any) -> str | None:
    """Why edits of a request cannot be served here; None: they can."""
    if params.min_tokens and params.structured_outputs is not None:
        return "min_tokens and a grammar"  # vLLM lets a stop id pass where the grammar allows no other
    if params.logit_bias and not all(math.isfinite(bias) for bias in params.logit_bias.values()):
        return "an infinite logit_bias"
    if max(map(len, params.bad_words_token_ids or ()), default=0) > LONGEST:
        return f"bad words of over {LONGEST} tokens"
    return None


def padded(rows: Sequence[Sequence[int]], width: int | None = None, *, is_left: bool = False) -> Tensor:
    """int32 ``[rows, longest]`` on the host, -1 behind each row, or before it."""
    width = max(map(len, rows), default=0) if width is None else width
    filler = [[-1] * (width - len(row)) for row in rows]
    both = [[*pad, *row] if is_left else [*row, *pad] for row, pad in zip(rows, filler, strict=True)]
    return torch.tensor(both, dtype=torch.int32).reshape(len(rows), width)


class Texts:
    """Token counts and last tokens of texts, by slot; one slot more is always empty."""

    def __init__(self, slots: int, longest: int, device: torch.device) -> None:
        """Empty texts of up to `longest` distinct ids each."""
        self.longest, self.room = longest, min(longest, ROOM)
        self.bound = 0  # no text is longer, as far as the host knows
        self.counts = TokenCounts.empty(slots + 1, self.room, device=device)
        self.recent = torch.full((slots + 1, LONGEST - 1), -1, dtype=torch.int32, device=device)  # generated ones
        self.length = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.empty = slots

    def begin(self, slots: Tensor, prompts: Tensor, outputs: Tensor) -> None:
        """Slots, int64 ``[n]``, hold these texts and nothing else: ids ``[n, columns]``, -1 behind the last."""
        columns = prompts.shape[1] + outputs.shape[1]
        self.bound = max(self.bound, columns)
        self._hold(columns)
        self.counts.clear(slots)
        self.recent.index_fill_(0, slots, -1)
        count_tokens(self.counts, prompts, slots=slots.int(), is_prompt=True)
        self.length[slots] = (prompts >= 0).sum(1)
        self._append(slots, outputs, (outputs >= 0).sum(1))

    def append(self, slots: Tensor, token_ids: Tensor, amount: Tensor) -> None:
        """The first `amount` ids of each row ``[n, width]``, none where it is negative, continue the texts."""
        self.bound += token_ids.shape[1]
        if self.bound > self.room < self.longest:  # a wait for the device, each time that so many tokens may have come
            self.bound = int(self.length.max()) + token_ids.shape[1]
            self._hold(self.bound)
        self._append(slots, token_ids, amount)

    def _append(self, slots: Tensor, token_ids: Tensor, amount: Tensor) -> None:
        width = token_ids.shape[1]
        amount = amount.clamp(0, width)
        column = torch.arange(width, device=token_ids.device)
        ids = token_ids.int().masked_fill(column >= amount[:, None], -1)
        count_tokens(self.counts, ids, slots=slots.int())
        both = torch.cat((self.recent[slots], ids), 1)
        self.recent[slots] = both.gather(1, amount[:, None] + torch.arange(LONGEST - 1, device=ids.device))
        self.length[slots] += amount

    def _hold(self, tokens: int) -> None:
        """Have tables for texts of so many tokens, or of the most that there can be."""
        if tokens > self.room < self.longest:
            while tokens > self.room:
                self.room *= 2
            self.room = min(self.room, self.longest)
            self.counts = grown(self.counts, self.room)


def grown(counts: TokenCounts, distinct: int) -> TokenCounts:
    """The same texts in tables for so many distinct ids, more than before."""
    ids, found = counts
    assert ids is not None and found is not None
    new = TokenCounts.empty(len(ids), distinct, device=ids.device)
    assert new.token_ids is not None and new.token_counts is not None
    count_tokens(new, ids)
    # Ids of a text are all different: in order, both tables have the same ones last.
    place = new.token_ids.argsort(1)[:, -ids.shape[1] :]
    new.token_counts.scatter_(1, place, found.gather(1, ids.argsort(1)))
    return new


class Wishes(NamedTuple):
    """What the requests of a batch change, in the order of its rows; the parts of one composition of the batch.

    Attributes:
        edits: without counts, slots and tail; `min_tokens` counts from the prompt's end.
        allowed: int32 ``[batch, ceil(vocab / 32)]``: bit v % 32 of word v // 32 says that id v may come; None: all may.
        prompt: int64 ``[batch]``, lengths of the prompts.
        slots: int64 ``[batch]`` of `Texts`.
    """

    edits: Edits
    allowed: Tensor | None
    prompt: Tensor
    slots: Tensor

    @classmethod
    def of(cls, params: Sequence[Any], prompt: Sequence[int], slots: Sequence[int], vocab: int, device: Any) -> Wishes:
        """From SamplingParams; None where a request changes nothing."""
        parts: dict[str, Any] = {}

        def collect(name: str) -> list[Any]:
            return [None if p is None else getattr(p, name) for p in params]

        penalties = (("repetition_penalty", 1.0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0))
        for name, off in penalties:
            values = [off if value is None else value for value in collect(name)]
            if any(value != off for value in values):
                parts[name.removesuffix("_penalty")] = torch.tensor(values, dtype=torch.float32)
        biases = [bias or {} for bias in collect("logit_bias")]
        if any(biases):
            parts["bias_ids"] = padded([list(bias) for bias in biases])
            parts["bias"] = torch.zeros(parts["bias_ids"].shape)
            for row, bias in enumerate(biases):
                parts["bias"][row, : len(bias)] = torch.tensor(list(bias.values()))
        least = [value or 0 for value in collect("min_tokens")]
        if any(least):
            stops = [sorted(p.all_stop_token_ids) if n else [] for p, n in zip(params, least, strict=True)]
            parts["stop_ids"], parts["min_tokens"] = padded(stops), torch.tensor(least, dtype=torch.int32)
        words = [words or [] for words in collect("bad_words_token_ids")]
        if any(words):
            most, longest = max(map(len, words)), max(len(word) for some in words for word in some)
            rows = [padded([*some, *[[]] * (most - len(some))], longest, is_left=True) for some in words]
            parts["bad_words"] = torch.stack(rows)
        edits = Edits()._replace(**{name: part.to(device, non_blocking=True) for name, part in parts.items()})
        allowed = bits_of(collect("allowed_token_ids"), vocab)
        return cls(
            edits,
            None if allowed is None else allowed.to(device, non_blocking=True),
            torch.tensor(prompt, dtype=torch.int64).to(device, non_blocking=True),
            torch.tensor(slots, dtype=torch.int64).to(device, non_blocking=True),
        )

    def at(self, texts: Texts | None, position: Tensor) -> Edits | None:
        """What changes in a step whose first token stands at `position` of each text."""
        edits = self.edits
        if edits == Edits():
            return None
        if edits.min_tokens is not None:
            edits = edits._replace(min_tokens=(edits.min_tokens - (position - self.prompt)).int())
        if edits.has_penalties:
            assert texts is not None
            edits = edits._replace(counts=texts.counts, slots=self.slots.int())
        if edits.bad_words is not None:
            assert texts is not None
            before = edits.bad_words.shape[2] - 1
            edits = edits._replace(tail=texts.recent[self.slots][:, LONGEST - 1 - before :].contiguous())
        return edits


def bits_of(allowed: Sequence[Sequence[int] | None], vocab: int) -> Tensor | None:
    """Bitmask of lists of ids, all bits where there is none; None: there is none at all."""
    if not any(allowed):
        return None
    bits = torch.zeros(len(allowed), -(-vocab // 32) * 32, dtype=torch.int64)
    for row, ids in zip(bits, allowed, strict=True):
        row[slice(None) if not ids else [id for id in ids if 0 <= id < vocab]] = 1
    weight = torch.ones(32, dtype=torch.int64) << torch.arange(32)
    words: Tensor = (bits.unflatten(1, (-1, 32)) * weight).sum(2)
    return words.to(torch.int32)
