"""Logits processors as calls that must be made, followed by a distribution that the kernels know."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import (
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_kernels import Edits, Sampling

# In this order the filters are those of `Sampling`: what keeps the k best and what keeps enough beside the best cut the
# same tail, so they may change places; the nucleus is measured in what is left, so it comes last.
ORDER = {"temperature": 0, "min_p": 1, "top_k": 1, "top_p": 2}
WHOLE = (nn.Module, type, FunctionType, MethodType)  # looked at from outside
PLAIN = (int, float, str, bytes)
DEPTH = 6  # of a processor's parts that are looked into


def split(processors: Sequence[Any], *, batch: int, device: torch.device) -> tuple[list[Any], Sampling]:
    """The processors that must be called, in their order, and the distribution of those behind them.

    Args:
        processors: of a sampled text.
        batch: requests.
        device: of the distribution.
    """
    calls, latest = list(processors), ORDER["top_p"]
    values: dict[str, Any] = {}
    while calls:
        found = _parameter(calls[-1])
        if found is None or (found[0] and (found[0] in values or ORDER[found[0]] > latest)):
            break
        calls.pop()
        if found[0]:
            values[found[0]], latest = found[1], ORDER[found[0]]
    return calls, Sampling.full(batch, **values, device=device)


def likely(processors: Sequence[Any], *, batch: int, device: torch.device) -> Sampling:
    """A distribution for drafts: all warpers that the kernels know, whatever their order."""
    found = [pair for processor in processors if (pair := _parameter(processor)) is not None and pair[0]]
    return Sampling.full(batch, **dict(found), device=device)


def _parameter(processor: Any) -> tuple[str, Any] | None:
    """The `Sampling` field equal to a processor; ("", None): the processor changes nothing; None: there is no field."""
    kind = type(processor)
    if kind is LogitNormalization:
        return "", None
    if kind is TemperatureLogitsWarper:
        return "temperature", processor.temperature
    if kind not in (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper) or processor.filter_value != -float("inf"):
        return None
    if kind is TopKLogitsWarper:
        return "top_k", processor.top_k
    if processor.min_tokens_to_keep != 1:
        return None
    if kind is MinPLogitsWarper:
        return "min_p", processor.min_p
    return ("top_p", processor.top_p) if processor.top_p > 0 else None


class _Edited:
    """`Edits` equal to some processors, the same for every request; found from the last processor to the first."""

    def __init__(self, width: int, padding: set[int]) -> None:
        """`width`: columns of the prompts, padding included; `padding`: ids in it."""
        self.width, self.repetition, self.least, self.padding = width, 1.0, 0, padding
        self.bias: dict[int, float] = {}
        self.banned: set[int] = set()
        self.words: list[tuple[int, ...]] = []
        self.stops: list[int] | None = None
        self.skipped = torch.tensor(0)

    def take(self, processor: Any) -> bool:
        """Whether the processor has its place among them. A bias comes before the penalty; a ban may come anywhere."""
        kind = type(processor)
        if kind is SuppressTokensLogitsProcessor:
            self.banned |= set(processor.suppress_tokens.tolist())
            return True
        if kind is NoBadWordsLogitsProcessor:
            return self._take_words(processor.sequence_bias)
        if kind in (
            MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, SuppressTokensAtBeginLogitsProcessor
        ):  # fmt: skip
            return self._take_least(processor)
        if kind is RepetitionPenaltyLogitsProcessor:
            skipped = processor.prompt_ignore_length
            skipped = torch.as_tensor(0 if skipped is None else skipped)
            is_whole = processor.logits_indices is None and int(skipped.max()) <= self.width
            if not is_whole or self.repetition != 1.0 or self.bias:
                return False
            self.repetition, self.skipped = float(processor.penalty), skipped
            return True
        return kind is SequenceBiasLogitsProcessor and self._take_bias(processor.sequence_bias)

    def _take_words(self, words: Collection[Sequence[int]]) -> bool:
        """Bad words; none that may begin in the padding, which the kernels do not see."""
        if any(int(x) in self.padding for word in words for x in word[:-1]):
            return False
        self.words += [tuple(int(x) for x in word) for word in words]
        return True

    def _take_bias(self, biases: Mapping[Sequence[int], float]) -> bool:
        """Of single ids; of longer sequences a ban of the last id, which is a bad word."""
        single = {int(ids[0]): float(value) for ids, value in biases.items() if len(ids) == 1}
        longer = {ids: value for ids, value in biases.items() if len(ids) > 1}
        if (single and self.bias) or any(value != -float("inf") for value in longer.values()):
            return False
        if not self._take_words(longer):
            return False
        self.bias = single or self.bias
        return True

    def _take_least(self, processor: Any) -> bool:
        if isinstance(processor, SuppressTokensAtBeginLogitsProcessor):
            stops, least = processor.begin_suppress_tokens, processor.begin_index + 1 - self.width
            if least > 1:  # not the first new token
                return False
        elif isinstance(processor, MinLengthLogitsProcessor):
            stops, least = processor.eos_token_id, processor.min_length - self.width
        else:
            least = processor.min_new_tokens + processor.prompt_length_to_skip - self.width
            stops = processor.eos_token_id
        ids = sorted(torch.as_tensor(stops).flatten().tolist())
        if self.stops not in (None, ids):
            return False
        self.stops, self.least = ids, max(self.least, least)
        return True

    def edits(self, batch: int, device: torch.device) -> Edits:
        """Of every request."""

        def every(values: Any, dtype: torch.dtype) -> Tensor:
            row = torch.tensor(values, dtype=dtype, device=device)
            return row.expand(batch, *row.shape).contiguous()

        bias = {**self.bias, **dict.fromkeys(self.banned, -float("inf"))}
        length = max(map(len, self.words), default=0)
        words = [[-1] * (length - len(word)) + list(word) for word in self.words]
        return Edits(
            bias_ids=every(list(bias), torch.int32) if bias else None,
            bias=every(list(bias.values()), torch.float32) if bias else None,
            repetition=every(self.repetition, torch.float32) if self.repetition != 1.0 else None,
            stop_ids=every(self.stops, torch.int32) if self.least > 0 else None,
            min_tokens=every(self.least, torch.int32) if self.least > 0 else None,
            bad_words=every(words, torch.int32) if words else None,
        )


def split_edits(
    calls: Sequence[Any], *, batch: int, width: int, padding: set[int], device: torch.device
) -> tuple[list[Any], Edits | None, Tensor]:  # fmt: skip
    """The processors that must be called, those behind them as `Edits`, and the columns that no penalty sees.

    `Edits` are None where there are none; the columns, int64 ``[batch]``, are the padding of the prompts as a rule.

    Args:
        calls: processors, in their order.
        batch: requests.
        width: columns of the prompts.
        padding: ids in the prompts' padding.
        device: of the edits.
    """
    left, found = list(calls), _Edited(width, padding)
    while left and found.take(left[-1]):
        left.pop()
    skipped = found.skipped.to(device).expand(batch)
    return left, found.edits(batch, device) if len(left) < len(calls) else None, skipped


class Calls:
    """Processors that are called with prefixes in any order, some of which hold tokens that are rejected later.

    That is right for a processor that is a function of the prefix and the logits. One that changes from call to call is
    refused; what it sets up in its first call is no change.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        """Take the processors."""
        self._processors = list(processors)
        self._states: list[list[tuple[Any, int]] | None] = [None] * len(self._processors)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._processors)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[batch, vocab]`` behind the prefixes ``[batch, columns]``.

        Raises:
            ValueError: a processor keeps a state.
        """
        for i, processor in enumerate(self._processors):
            scores = processor(ids, scores)
            state, known = list(_leaves(processor, DEPTH)), self._states[i]
            if known is not None and not _same(state, known):
                raise ValueError(
                    f"specdec_loop.hf: logits processor {type(processor).__name__} must be a function of prefix and "
                    "logits, got one that its calls change: drafts that are rejected would leave a trace in it"
                )
            self._states[i] = state
        return scores


def _leaves(value: Any, depth: int) -> Iterator[tuple[Any, int]]:
    """Contents of an object, recursively; tensors with their version counter."""
    if isinstance(value, Tensor):
        yield value, 0 if value.is_inference() else value._version
    elif depth and isinstance(value, dict | list | tuple | set | frozenset):
        parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
        yield None, len(value)
        for part in parts:
            yield from _leaves(part, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, WHOLE):
        yield from _leaves(vars(value), depth - 1)
    else:
        yield value, 0


def _same(state: list[tuple[Any, int]], known: list[tuple[Any, int]]) -> bool:
    pairs = zip(state, known, strict=False)
    return len(state) == len(known) and all(
        m == n and (x is y or (isinstance(x, PLAIN) and type(x) is type(y) and x == y)) for (x, m), (y, n) in pairs
    )
