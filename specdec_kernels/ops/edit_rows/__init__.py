"""What biases, penalties and bans change of each row, at every drafted position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._check import ID_DTYPES, Checker, fail
from ..._codes import Backend
from ..._edits import BLOCK, MAX_VOCAB, Edits, RowEdits, TokenCounts
from ..._op import Op, Shape
from . import reference


def _shapes(
    batch: int, vocab: int, draft_ids: Tensor | None, parents: object, cu_draft: Tensor | None, max_draft: int,
    only_last: bool, *rest: Any,
) -> tuple[Shape, ...]:  # fmt: skip
    rows = batch if only_last else batch * (max_draft + 1)
    if cu_draft is not None and draft_ids is not None:
        rows = draft_ids.shape[0] + batch
    edits = Edits(*[*rest[:5], TokenCounts(*rest[5:7]), *rest[7:12]])
    words, room = (vocab + BLOCK - 1) // BLOCK, min(edits.room(max_draft), vocab)
    return ((rows, words), torch.int64), ((rows, words + 1), torch.int32), ((4, rows, room), torch.float32)


op = Op(reference.edit_rows, _shapes, results=RowEdits._fields)


def edit_rows(
    edits: Edits,
    draft_ids: Tensor | None = None,
    *,
    vocab: int,
    parents: Tensor | None = None,
    cu_draft: Tensor | None = None,
    max_draft: int | None = None,
    only_last: bool = False,
    active: Tensor | None = None,
    first_id: int = 0,
    out: RowEdits | None = None,
    backend: Backend | None = None,
) -> RowEdits:
    """Say how biases, penalties and bans change each row of logits, given the drafts before the row.

    The row at position i of a draft follows the tokens so far and the first i drafts: its penalties, bans and stop ids
    are others as soon as one draft differs. The result lists the ids that change, row by row, and every op on rows
    takes it as `edits`; no logits are read, so that it can be made while the target model runs.

    Args:
        edits: what each request asks for.
        draft_ids: int32 or int64 ``[batch, draft]``: rows as `verify_chain` has them, one behind each draft and one
            before the first. ``[total]`` with `cu_draft`; ``[batch, nodes]`` with `parents`, where the root's id is not
            looked at: it counts as text. -1 is no token. None: one row a request.
        vocab: ids of a row, a host int below 2^23.
        parents: int32 or int64 ``[batch, nodes]``: the drafts are trees, and row n follows node n.
        cu_draft: see `verify_chain`.
        max_draft: see `verify_chain`.
        only_last: one row a request, the one behind all of its drafts, as a drafter reads it.
        active: bool ``[batch]``: see `Sampling`; nothing of another request is read, and its rows have no edits.
        first_id: id of the first column, where ranks hold the vocabulary in parts.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        RowEdits. Rows of padding, of a malformed layout and of nodes that are not there list nothing.

    Raises:
        ValueError: wrong shapes, dtypes, devices or combinations.

    Example:
        >>> import torch
        >>> from specdec_kernels import Edits, edit_rows
        >>> edits = Edits(presence=torch.tensor([1.5]))
        >>> rows = edit_rows(edits, torch.tensor([[2, 0]]), vocab=4)  # before the drafts, behind 2, behind 2 0
        >>> rows.apply(torch.zeros(3, 4))
        tensor([[ 0.0000,  0.0000,  0.0000,  0.0000],
                [ 0.0000,  0.0000, -1.5000,  0.0000],
                [-1.5000,  0.0000, -1.5000,  0.0000]])
    """
    name = "edit_rows"
    if not isinstance(edits, Edits):
        fail(name, "edits", "an Edits", type(edits).__name__)
    some = next((part for part in (draft_ids, *edits) if isinstance(part, Tensor)), None)
    if some is None:
        fail(name, "draft_ids", "given where edits hold no tensor", None)
    check = Checker(name, some.device)
    batch, width = _layout(check, draft_ids, parents, cu_draft, max_draft) if draft_ids is not None else (len(some), 0)
    if draft_ids is None and (parents is not None or cu_draft is not None):
        fail(name, "draft_ids", "given with parents and cu_draft", None)
    if only_last and (parents is not None or cu_draft is not None):
        fail(name, "only_last", "False with parents and cu_draft", True)
    check.request_edits("edits", edits, batch)
    if active is not None:
        check.vector("active", active, (torch.bool,), batch)
    check.size("first_id", first_id, 0)
    check.size("vocab", vocab, 1)
    if vocab > MAX_VOCAB:
        fail(name, "vocab", f"less than {MAX_VOCAB + 1}", vocab)
    arguments = (batch, vocab, draft_ids, parents, cu_draft, width, only_last, *edits.flat(), active, first_id)
    if out is not None and not isinstance(out, RowEdits):
        fail(name, "out", "a RowEdits", type(out).__name__)
    given: Any = None if out is None else tuple(out)
    return RowEdits(*op(*arguments, device=check.device, backend=backend, out=given))


def _layout(check: Checker, draft_ids: Any, parents: Any, cu_draft: Any, max_draft: Any) -> tuple[int, int]:
    """(batch, most drafts before a row)."""
    if not isinstance(draft_ids, Tensor):
        fail(check.op, "draft_ids", "a tensor of int32 or int64", type(draft_ids).__name__)
    if parents is None:
        return check.chain_ids(draft_ids, cu_draft, max_draft)
    if cu_draft is not None:
        fail(check.op, "cu_draft", "None where parents are given", "a tensor")
    batch, nodes = check.parents(parents)
    check.dense("draft_ids", draft_ids, ID_DTYPES, (batch, nodes))
    return batch, nodes - 1
