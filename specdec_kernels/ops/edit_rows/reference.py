"""edit_rows, spelled plainly: three dense numbers for every id of every row, packed. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _chains, _trees
from ..._edits import Edits, packed
from ..._types import EditArguments

_INF = float("inf")


class _Rows:
    """Rows that are edited: of each its request, the ids before it, and what happens to its logits."""

    def __init__(self, request: Tensor, path: Tensor, vocab: int, first_id: int) -> None:
        self.request, self.path, self.vocab, self.first = request, path, vocab, first_id
        shape = (len(request), vocab)
        self.listed = torch.zeros(shape, dtype=torch.bool, device=path.device)
        self.bias, self.minus = (torch.zeros(shape, dtype=torch.float32, device=path.device) for _ in range(2))
        self.repetition = torch.ones(shape, dtype=torch.float32, device=path.device)

    def at(self, ids: Tensor, values: Tensor) -> Tensor:
        """Dense [rows, vocab] sums of `values` [rows, n] by id; ids outside this rank's are skipped."""
        column = ids.long() - self.first
        column = torch.where((ids >= 0) & (column >= 0) & (column < self.vocab), column, self.vocab)
        out = torch.zeros(len(ids), self.vocab + 1, dtype=values.dtype, device=values.device)
        return out.scatter_add(1, column, values)[:, : self.vocab]

    def has(self, ids: Tensor) -> Tensor:
        """Whether an id is among `ids` [rows, n], bool [rows, vocab]."""
        return self.at(ids, torch.ones_like(ids, dtype=torch.int32)) > 0

    def of(self, values: Tensor | None, off: float) -> Tensor:
        """A parameter of each row's request, [rows, 1]."""
        if values is None:
            return torch.full((len(self.request), 1), off, dtype=torch.float32, device=self.path.device)
        return values[self.request][:, None]


def edit_rows(given: EditArguments) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec_kernels.edit_rows`."""
    edits, vocab = given.edits, given.vocab
    number, request, path = _places(given)
    count = given.batch if given.only_last else given.batch * (given.max_draft + 1)
    if given.cu_draft is not None and given.draft_ids is not None:
        count = len(given.draft_ids) + given.batch
    # A malformed cu_draft may give several requests a row: the last of them has it.
    last = number.new_full((count,), -1).scatter_reduce(0, number, request, "amax")
    number, request, path = (part[last[number] == request] for part in (number, request, path))
    rows = _Rows(request, path, vocab, given.first_id)
    _bias(rows, edits)
    _penalise(rows, edits)
    _ban(rows, edits)
    listed = rows.listed.new_zeros(count, vocab).index_copy(0, number, rows.listed)
    planes = torch.stack([rows.bias, rows.repetition, rows.minus])
    planes = planes.new_zeros(3, count, vocab).index_copy(1, number, planes)
    return tuple(packed(listed, planes, min(edits.room(given.max_draft), vocab)))  # type: ignore[return-value]


def _places(given: EditArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row that is edited: its number among all rows, its request, and the ids before it, -1 where none."""
    batch, width = given.batch, given.max_draft
    some = (given.draft_ids, given.active, *given.edits[:5], *given.edits.counts, *given.edits[6:])
    device = next(part.device for part in some if part is not None)
    active = torch.ones(batch, dtype=torch.bool, device=device) if given.active is None else given.active
    node, slot = torch.arange(width + 1, device=device), torch.arange(batch, device=device)[:, None]
    parents, number = (node - 1).expand(batch, -1), slot * (width + 1) + node
    lost, length = ~active, torch.full((batch,), width, device=device)
    ids = torch.full((batch, width + 1), -1, device=device)
    if given.parents is not None and given.draft_ids is not None:
        parents, ids = given.parents, given.draft_ids.long()
    elif given.draft_ids is not None:
        chains = _chains.chains(given.draft_ids, given.draft_ids, None, given.cu_draft, width)
        ids = torch.nn.functional.pad(chains.ids, (1, 0), value=-1)
        lost = lost | chains.lost
        if given.cu_draft is not None and chains.first is not None:
            number = chains.first[:, None] + slot + node
            length = torch.where(chains.bad, 0, given.cu_draft[1:] - chains.first)
    tree = _trees.tree(parents, width)
    path = torch.where(tree.ancestors & (node > 0), ids[:, None, :], -1)  # [batch, node, ancestor]
    used = tree.present & (node <= length[:, None]) & ~lost[:, None]
    if given.only_last:
        number, used = slot + node * 0, used & (node == width)
    return number[used], slot.expand_as(used)[used], path[used]


def _bias(rows: _Rows, edits: Edits) -> None:
    if edits.bias_ids is None or edits.bias is None:
        return
    ids, values = edits.bias_ids[rows.request], edits.bias[rows.request]
    rows.bias = rows.at(ids, values)
    rows.listed = rows.listed | rows.has(ids)


def _penalise(rows: _Rows, edits: Edits) -> None:
    if not edits.has_penalties:
        return
    generated = rows.at(rows.path, torch.ones_like(rows.path))
    in_prompt = torch.zeros_like(rows.listed)
    if edits.counts.token_ids is not None and edits.counts.token_counts is not None and len(edits.counts.token_ids):
        slot = rows.request if edits.slots is None else edits.slots.long()[rows.request]
        size = len(edits.counts.token_ids)
        is_slot, slot = ((slot >= 0) & (slot < size))[:, None], slot.clamp(0, size - 1)
        ids, counts = torch.where(is_slot, edits.counts.token_ids[slot], -1), edits.counts.token_counts[slot]
        generated = generated + rows.at(ids, (counts >> 1).clamp(min=0).long())
        in_prompt = rows.has(torch.where(counts & 1 == 1, ids, -1))
    repetition = rows.of(edits.repetition, 1.0)
    frequency, presence = rows.of(edits.frequency, 0.0), rows.of(edits.presence, 0.0)
    repeats = (in_prompt | (generated > 0)) & (repetition != 1)
    counted = (generated > 0) & ((frequency != 0) | (presence != 0))
    rows.repetition = torch.where(repeats, repetition, 1.0)
    rows.minus = torch.where(counted, frequency * generated + presence, 0.0)
    rows.listed = rows.listed | repeats | counted


def _ban(rows: _Rows, edits: Edits) -> None:
    banned = torch.zeros_like(rows.listed)
    if edits.stop_ids is not None and edits.min_tokens is not None:
        early = (rows.path != -1).sum(1, keepdim=True) < rows.of(edits.min_tokens, 0)
        banned = banned | (early & rows.has(edits.stop_ids[rows.request]))
    if edits.bad_words is not None:
        words = edits.bad_words[rows.request]  # [rows, words, length]
        before = _last_tokens(rows, edits, words.shape[2] - 1)
        rest = words[:, :, :-1]
        meets = ((rest == before[:, None, :]) | (rest == -1)).all(2)
        banned = banned | rows.has(torch.where(meets, words[:, :, -1], -1))
    rows.bias = torch.where(banned, -_INF, rows.bias)
    rows.listed = rows.listed | banned


def _last_tokens(rows: _Rows, edits: Edits, count: int) -> Tensor:
    """The last tokens before each row, [rows, count], -1 where the text is shorter."""
    start = torch.full((len(rows.path), count), -1, device=rows.path.device)
    tail = start if edits.tail is None else edits.tail.long()[rows.request]
    text = torch.cat([start, tail, rows.path], dim=1)
    known = torch.ones_like(text, dtype=torch.bool)
    known[:, start.shape[1] + tail.shape[1] :] = rows.path != -1  # the path has gaps, the text none
    order = torch.argsort(known.int(), dim=1, stable=True)
    return text.gather(1, order)[:, text.shape[1] - count :]
