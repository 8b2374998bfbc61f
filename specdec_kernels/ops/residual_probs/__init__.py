"""The correction distribution norm((a p - b q)+), materialised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._codes import Backend
from ..._edits import RowEdits
from ..._op import Op, Shape
from ..._shards import check_residual
from ..._types import Sampling
from . import reference


class ResidualProbs(NamedTuple):
    """Result of `residual_probs`.

    Attributes:
        probs: float32, of the shape of target_logits; p where the residual is empty, 0 on a bad row.
        mass: float32 ``[batch]``: ``sum (a p - b q)+`` before normalising.
        status: int32 ``[batch]``: 1 bad target row, 2 bad draft row (then q = 0), 4 bad draft id, 8 empty, 64.
    """

    probs: Tensor
    mass: Tensor
    status: Tensor


def _shapes(target_logits: Tensor, *_: object) -> tuple[Shape, ...]:
    batch = target_logits.shape[:1]
    return (target_logits.shape, torch.float32), (batch, torch.float32), (batch, torch.int32)


op = Op(reference.residual_probs, _shapes, results=ResidualProbs._fields)


def residual_probs(
    target_logits: Tensor,
    draft_logits: Tensor | None = None,
    *,
    a: float | Tensor = 1.0,
    b: float | Tensor = 1.0,
    sampling: Sampling,
    draft_sampling: Sampling | None = None,
    token_map: Tensor | None = None,
    allowed: Tensor | None = None,
    edits: RowEdits | None = None,
    draft_edits: RowEdits | None = None,
    draft_ids: Tensor | None = None,
    group: Any = None,
    vocab_offsets: Sequence[int] | None = None,
    out: ResidualProbs | None = None,
    backend: Backend | None = None,
) -> ResidualProbs:
    """``norm((a p - b q)+)`` as a probability row, and its mass.

    With a = b = 1 this is the distribution of the token after a rejection; block, recursive and batch rules use other
    scalars.

    Args:
        target_logits: float32, bfloat16 or float16 ``[batch, vocab]``.
        draft_logits: ``[batch, draft_vocab]``, or None: q is a point mass at `draft_ids`, or nothing without them.
        a: weight of p, a float or float32 ``[batch]``; finite and >= 0.
        b: weight of q, likewise.
        sampling: the target's sampling parameters.
        draft_sampling: the draft's; required with `draft_logits`. Temperature 0: a point mass at `draft_ids`.
        token_map: int32 ``[draft_vocab]``: target id of each draft column.
        allowed: int32 ``[batch, ceil(vocab / 32)]`` packed bits of the target row.
        edits: see `verify_chain`.
        draft_edits: see `verify_chain`.
        draft_ids: int64 ``[batch]``: where q is a point mass; -1 is no draft.
        group: process group whose ranks hold a part of the vocabulary each, see `verify_chain`.
        vocab_offsets: with `group`, the first id of each rank, then the size of the vocabulary.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        ResidualProbs.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import Sampling, residual_probs
        >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
        >>> residual_probs(p, q, sampling=Sampling(), draft_sampling=Sampling()).probs
        tensor([[0., 1.]])
    """
    _, arguments, shards = check_residual(
        "residual_probs", target_logits, draft_logits, a, b, sampling, draft_sampling,
        token_map, allowed, edits, draft_edits, draft_ids, group, vocab_offsets, backend,
    )  # fmt: skip
    return ResidualProbs(*op(*arguments, device=target_logits.device, backend=backend, out=out, vocabulary=shards))
