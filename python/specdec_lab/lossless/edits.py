"""Edits in the laboratory: what they make of a table, from the definition, and the same as texts grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Edits, RowEdits, TokenCounts, count_tokens, edit_rows

from .exact import Table, tree_of_histories

INF = float("inf")
LEAST_IDS = 3  # of a table, for the edits below


_ALL = Edits(
    bias_ids=torch.tensor([[2, 0]]).int(), bias=torch.tensor([[1.2, -0.6]]), repetition=torch.tensor([1.6]),
    frequency=torch.tensor([0.7]), presence=torch.tensor([-0.4]), stop_ids=torch.tensor([[1]]).int(),
    min_tokens=torch.tensor([3]).int(), bad_words=torch.tensor([[[-1, 0, 1], [2, 0, 2]]]).int(),
)  # fmt: skip
_NAMED = {
    "penalties": ("repetition", "frequency", "presence"), "bias": ("bias_ids", "bias"),
    "min_tokens": ("stop_ids", "min_tokens"), "bad words": ("bad_words",), "all": _ALL._fields,
}  # fmt: skip
# Of one request.
EDITS = {case: Edits()._replace(**{name: getattr(_ALL, name) for name in names}) for case, names in _NAMED.items()}


def edited(row: Tensor, history: Sequence[int], edits: Edits) -> Tensor:
    """Logits ``[vocab]`` behind a history, float64: the edits of one request in the order that `Edits` gives."""
    row = row.double().clone()
    if edits.bias_ids is not None and edits.bias is not None:
        row[edits.bias_ids[0].long()] += edits.bias[0].double()
    for x in set(history):
        if edits.repetition is not None:
            row[x] = row[x] / edits.repetition[0] if row[x] > 0 else row[x] * edits.repetition[0]
        if edits.frequency is not None:
            row[x] -= edits.frequency[0] * list(history).count(x)
        if edits.presence is not None:
            row[x] -= edits.presence[0]
    if edits.stop_ids is not None and edits.min_tokens is not None and len(history) < int(edits.min_tokens[0]):
        row[edits.stop_ids[0].long()] = -INF
    for word in [] if edits.bad_words is None else edits.bad_words[0].tolist():
        *rest, last = (x for x in word if x >= 0)
        if list(history[len(history) - len(rest) :]) == rest:
            row[last] = -INF
    return row


def edited_table(table: Table, edits: Edits, length: int) -> Table:
    """Edited rows of every history of fewer than `length` tokens, in order of their lengths; then texts begin anew."""
    histories: list[tuple[int, ...]] = [()]
    contexts, last = [0], [0]
    for _ in range(length - 1):
        histories += [(*histories[n], x) for n in last for x in range(table.vocab)]
        first = len(contexts)
        contexts += [x for n in last for x in table.after[contexts[n]].tolist()]
        last = list(range(first, len(contexts)))
    places = list(zip(contexts, histories, strict=True))
    target, draft = (torch.stack([edited(of[c], h, edits) for c, h in places]) for of in (table.target, table.draft))
    return Table(target, draft, tree_of_histories(table.vocab, length))


class GrowingEdits:
    """The edits of one request, asked for by every text of a batch that grows."""

    def __init__(self, edits: Edits, texts: int, vocab: int, device: str) -> None:
        """Empty texts, of so many ids."""
        counts = TokenCounts.empty(texts, vocab, device=device) if edits.has_penalties else TokenCounts()
        parts = {name: part for name, part in edits._asdict().items() if isinstance(part, Tensor)}
        every = {name: part.expand(texts, *part.shape[1:]).contiguous().to(device) for name, part in parts.items()}
        self._edits = edits._replace(**every, counts=counts)

    def now(self, tokens: Tensor, done: Tensor) -> Edits:
        """Behind the first `done` tokens of each text ``[texts, columns]``."""
        edits = self._edits
        if edits.min_tokens is not None:
            edits = edits._replace(min_tokens=(edits.min_tokens - done).int())
        if edits.bad_words is not None:
            place = done[:, None] - torch.arange(edits.bad_words.shape[2] - 1, 0, -1, device=done.device)
            tail = torch.where(place >= 0, tokens.gather(1, place.clamp(min=0)), -1)
            edits = edits._replace(tail=tail.int())
        return edits

    def grown(self, token_ids: Tensor) -> None:
        """Count what a step emitted, ``[texts, width]``, -1 where nothing."""
        if self._edits.has_penalties:
            count_tokens(self._edits.counts, token_ids)


class StepEdits(NamedTuple):
    """What edits change of the rows of a step.

    Attributes:
        target: of the rows that verify.
        draft: of the rows that the drafts were drawn from, numbered as the target's.
    """

    target: RowEdits | None = None
    draft: RowEdits | None = None


def step_edits(
    edits: Edits | None, token_ids: Tensor, vocab: int, parents: list[int] | None, *, only_first: bool
) -> StepEdits:
    """Of a chain ``[texts, draft]``, or of the nodes of a tree; `only_first`: a text's first row edits all of them."""
    if edits is None:
        return StepEdits()
    texts, rows = len(token_ids), token_ids.shape[1] + (parents is None)
    tree = None if parents is None else torch.tensor(parents, device=token_ids.device).repeat(texts, 1)
    drafted = edit_rows(edits, token_ids, vocab=vocab, parents=tree)
    if not only_first:
        return StepEdits(drafted, drafted)
    return StepEdits(drafted.pick(lambda x: x[::rows].repeat_interleave(rows, 0).contiguous()), drafted)
