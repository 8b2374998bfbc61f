"""`Edits` of requests, given to an op on rows in place of what `edit_rows` makes of them. Plain PyTorch.

A backend that can make the edits of a row when it comes to the row has an operator of its own for that, `<op>_edited`:
a row that is never read costs nothing. Elsewhere `edit_rows` makes those of all rows before the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _backends
from ._check import NO_ROW_EDITS
from ._edits import Edits, RowEdits
from ._op import OPS, Op, Shape
from ._scores import listing_shapes
from ._types import ChainArguments, TreeArguments
from ._vocabulary import Vocabulary

NO_TOP = -1  # no token is listed
NO_EDITS = Edits()  # made once: most calls have none
EXTRAS = len(NO_EDITS.flat()) + 1  # arguments of `<op>_edited` between top and those of the op: edits, are_of_drafts


class Layout(NamedTuple):
    """Where the rows of a call lie."""

    ids: Tensor
    parents: Tensor | None
    cu_draft: Tensor | None
    max_draft: int


class EditsGiven(NamedTuple):
    """Edits of a call, as operators take them.

    Attributes:
        rows: of the target rows.
        draft_rows: of the draft rows.
        wanted: of requests, made row by row; then `rows` are empty.
        are_of_drafts: `wanted` are those of the draft rows too; then `draft_rows` are empty.
    """

    rows: RowEdits
    draft_rows: RowEdits
    wanted: Edits
    are_of_drafts: bool

    def extras(self, top: int | None) -> tuple[Any, ...]:
        """Arguments of `<op>_edited` before those of the op; none where no row is made by it."""
        if self.wanted is NO_EDITS or all(part is None for part in self.wanted.flat()):
            return ()
        return (NO_TOP if top is None else top, *self.wanted.flat(), self.are_of_drafts)


NO_EDITS_GIVEN = EditsGiven(NO_ROW_EDITS, NO_ROW_EDITS, NO_EDITS, False)


def edits_given(
    op: Op, edited: Op, edits: RowEdits | Edits, draft_edits: RowEdits | Edits, layout: Layout, vocab: int, *,
    active: Tensor | None, shards: Vocabulary | None, backend: str | None,
) -> EditsGiven:  # fmt: skip
    """Edits of target and draft rows; made here where the operator of the chosen backend cannot make them."""

    def make(asked: Edits) -> RowEdits:
        return edited_rows(asked, layout, vocab, active, 0 if shards is None else shards.first, backend)

    wanted, are_same = NO_EDITS, False
    if isinstance(edits, Edits):
        if isinstance(draft_edits, Edits):
            are_same = all(one is other for one, other in zip(edits.flat(), draft_edits.flat(), strict=True))
        chosen = _backends.choose(op.name, op.backends, layout.ids.device, backend)
        if shards is None and chosen in edited.backends:
            wanted, edits = edits, NO_ROW_EDITS
        else:
            edits = make(edits)
        draft_edits = edits if are_same else draft_edits
    if isinstance(draft_edits, Edits):
        draft_edits = make(draft_edits)
    return EditsGiven(edits, draft_edits, wanted, are_same)


def edited_rows(
    edits: Edits, layout: Layout, vocab: int, active: Tensor | None, first_id: int, backend: str | None
) -> RowEdits:  # fmt: skip
    """Edits of all rows, by `edit_rows`."""
    ids, parents, cu_draft, width = layout
    batch = len(ids) if cu_draft is None else len(cu_draft) - 1
    rows = (batch, vocab, ids, parents, cu_draft, width, False)
    made = OPS["edit_rows"](*rows, *edits.flat(), active, first_id, device=ids.device, backend=backend)
    return RowEdits(*made)


def with_rows(given: ChainArguments | TreeArguments, edits: Edits, are_of_drafts: bool, layout: Layout) -> Any:
    """Arguments with the edits of all rows: `<op>_edited`, spelled plainly."""
    rows = edited_rows(edits, layout, given.target_logits.shape[-1], given.sampling.active, 0, "reference")
    return given._replace(edits=rows, draft_edits=rows if are_of_drafts else given.draft_edits)


def edited_shapes(shapes_of: Callable[..., tuple[Shape, ...]], top: int, *args: Any) -> tuple[Shape, ...]:
    """Shapes of the results of `<op>_edited`, given what gives those of the op."""
    shapes = shapes_of(*args[EXTRAS:])
    if top == NO_TOP:
        return *shapes, ((0,), torch.int32), ((0,), shapes[0][1]), ((0,), torch.float32)
    return *shapes, *listing_shapes(shapes[0], top)


def nothing_listed(token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `<op>_edited` returns for the listing where there is none."""
    return (
        token_ids.new_empty(0, dtype=torch.int32),
        token_ids.new_empty(0),
        token_ids.new_empty(0, dtype=torch.float32),
    )
