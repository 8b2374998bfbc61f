"""How likely each drafted token is to be accepted, and how close the two distributions are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _shards
from ..._check import Checker, fail
from ..._codes import Backend
from ..._edits import RowEdits
from ..._op import Op, Shape
from ..._types import Sampling
from . import reference


class RatioResult(NamedTuple):
    """Result of `acceptance_ratios`; positions that hold no draft, or a bad row, are 0.

    Attributes:
        ratio: float32 ``[batch, draft]``: ``min(1, p(x) / q(x))`` at each drafted id.
        overlap: float32 ``[batch, draft]``: ``sum min(p, q)``, the acceptance rate of that position.
        status: int32 ``[batch]``, as in `verify_chain`.
    """

    ratio: Tensor
    overlap: Tensor
    status: Tensor


def _shapes(draft_ids: Tensor, *rest: Any) -> tuple[Shape, ...]:
    cu_draft, width = rest[2], rest[3]
    batch = draft_ids.shape[0] if cu_draft is None else cu_draft.shape[0] - 1
    return ((batch, width), torch.float32), ((batch, width), torch.float32), ((batch,), torch.int32)


op = Op(reference.acceptance_ratios, _shapes, results=RatioResult._fields)


def acceptance_ratios(
    draft_ids: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None = None,
    *,
    cu_draft: Tensor | None = None,
    max_draft: int | None = None,
    sampling: Sampling,
    draft_sampling: Sampling | None = None,
    token_map: Tensor | None = None,
    allowed: Tensor | None = None,
    edits: RowEdits | None = None,
    draft_edits: RowEdits | None = None,
    group: Any = None,
    vocab_offsets: Sequence[int] | None = None,
    out: RatioResult | None = None,
    backend: Backend | None = None,
) -> RatioResult:
    """``min(1, p / q)`` at each drafted id and ``sum min(p, q)`` of each position, without writing p or q.

    Args:
        draft_ids: see `verify_chain`, as all other arguments.
        target_logits: ``[batch, draft + 1, vocab]`` or ``[total + batch, vocab]``; bonus rows are not read.
        draft_logits: ``[batch, draft, draft_vocab]`` or ``[total, draft_vocab]``; None: q is a point mass at the id.
        cu_draft: int32 ``[batch + 1]``: flat layout.
        max_draft: longest draft; needed with `cu_draft`.
        sampling: the target's sampling parameters.
        draft_sampling: the draft's; required with `draft_logits`.
        token_map: int32 ``[draft_vocab]``.
        allowed: packed bits per target row.
        edits: see `verify_chain`.
        draft_edits: see `verify_chain`.
        group: process group whose ranks hold a part of the vocabulary each, see `verify_chain`.
        vocab_offsets: with `group`, the first id of each rank, then the size of the vocabulary.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        RatioResult.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import Sampling, acceptance_ratios
        >>> rows = torch.zeros(1, 2, 4)
        >>> acceptance_ratios(torch.tensor([[2]]), rows, sampling=Sampling()).ratio
        tensor([[0.2500]])
    """
    name = "acceptance_ratios"
    check = Checker.of(name, "draft_ids", draft_ids, "of int32 or int64")
    batch, width = check.chain_ids(draft_ids, cu_draft, max_draft)
    vocab = check.chain_rows("target_logits", target_logits, draft_ids, cu_draft, width, bonus=True)
    draft_vocab = vocab
    if draft_logits is not None:
        draft_vocab = check.chain_rows("draft_logits", draft_logits, draft_ids, cu_draft, width, bonus=False)
        if draft_sampling is None:
            fail(name, "draft_sampling", "given with draft_logits: the distribution the drafts were drawn from", None)
    token_map = check.token_map(token_map, draft_vocab, vocab)
    sampling = check.sampling("sampling", sampling, batch)
    drafted = check.draft_sampling(draft_sampling, batch)
    rows = draft_ids.shape[0] + batch if cu_draft is not None else batch * (width + 1)
    shards = _shards.shards_of(name, group, vocab_offsets, vocab, backend)
    allowed = check.allowed(allowed, rows, vocab if shards is None else shards.size)
    edited = check.edits("edits", edits, rows, vocab)
    draft_edited = check.draft_edits(draft_edits, draft_logits, rows, token_map)
    arguments = (
        draft_ids, target_logits, draft_logits, cu_draft, width, *sampling, *drafted, token_map, allowed,
        *edited, *draft_edited,
    )  # fmt: skip
    return RatioResult(*op(*arguments, device=draft_ids.device, backend=backend, out=out, vocabulary=shards))
