"""edit_rows beside the float32 copy of all rows that engines change in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import RowEdits, edit_rows

from .cases import DEVICE
from .edits import EditCase, EditInput, cases, dense, edit_input
from .minimum import moved
from .suite import Run

QUICK = 1
CASES = cases("edit_rows")


def inputs(case: EditCase) -> list[EditInput]:
    """One step."""
    return [edit_input(case)]


def ours(case: EditCase, x: EditInput, backend: str) -> RowEdits:
    """One call of the package."""
    return edit_rows(x.edits, x.draft_ids, vocab=case.vocab, backend=backend)


def minimum(case: EditCase, x: EditInput, result: RowEdits) -> int:
    """Bytes of what each request asks for, of its text, and of the lists of its rows."""
    assert result.edit_start is not None
    listed = int(result.edit_start[:, -1].sum()) * 4 * 4
    given = [part for part in x.edits if isinstance(part, Tensor)]
    return moved(x.draft_ids, *given, *x.edits.counts, result.edit_bits, result.edit_start) + listed


def check(case: EditCase, run: Run, x: EditInput) -> None:
    """The rows of the reference, whatever else is listed."""
    got, want = run(x), ours(case, x, "reference")
    logits = _logits(case).flatten(0, 1)
    applied = got.apply(logits) if isinstance(got, RowEdits) else got.flatten(0, 1)
    torch.testing.assert_close(applied, want.apply(logits), rtol=1e-5, atol=1e-5)


def rivals(case: EditCase, made: Sequence[EditInput]) -> dict[str, Run]:
    """One, which copies and changes the logits themselves."""
    logits = _logits(case)
    return {"dense PyTorch": lambda x: dense(x, logits)}


def _logits(case: EditCase) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(case.batch, case.draft + 1, case.vocab, generator=g).to(DEVICE)
