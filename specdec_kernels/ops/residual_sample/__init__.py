"""Draw from the correction distribution norm((a p - b q)+) without materialising it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._codes import PURPOSES, Backend, Purpose
from ..._edits import RowEdits
from ..._op import Op, Shape
from ..._shards import check_residual
from ..._types import RngKey, Sampling
from . import reference


class ResidualSample(NamedTuple):
    """Result of `residual_sample`.

    Attributes:
        token_ids: int64 ``[batch]``; drawn from p where the residual is empty, -1 on a bad target row.
        mass: float32 ``[batch]``: ``sum (a p - b q)+``.
        status: int32 ``[batch]``: 1 bad target row, 2 bad draft row (then q = 0), 4 bad draft id, 8 empty, 64.
    """

    token_ids: Tensor
    mass: Tensor
    status: Tensor


def _shapes(target_logits: Tensor, *_: object) -> tuple[Shape, ...]:
    batch = target_logits.shape[:1]
    return (batch, torch.int64), (batch, torch.float32), (batch, torch.int32)


op = Op(reference.residual_sample, _shapes, results=ResidualSample._fields)


def residual_sample(
    target_logits: Tensor,
    draft_logits: Tensor | None = None,
    *,
    a: float | Tensor = 1.0,
    b: float | Tensor = 1.0,
    sampling: Sampling,
    draft_sampling: Sampling | None = None,
    rng: RngKey,
    purpose: Purpose = "residual",
    token_map: Tensor | None = None,
    allowed: Tensor | None = None,
    edits: RowEdits | None = None,
    draft_edits: RowEdits | None = None,
    draft_ids: Tensor | None = None,
    group: Any = None,
    vocab_offsets: Sequence[int] | None = None,
    out: ResidualSample | None = None,
    backend: Backend | None = None,
) -> ResidualSample:
    """One id a row from ``norm((a p - b q)+)``: the draw that every lossless rule ends with.

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
        rng: names the random numbers; the position is that of the drawn token.
        purpose: ``"residual"`` unless a rule says otherwise. Never the purpose the draft was drawn with.
        group: process group whose ranks hold a part of the vocabulary each, see `verify_chain`.
        vocab_offsets: with `group`, the first id of each rank, then the size of the vocabulary.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        ResidualSample.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import RngKey, Sampling, residual_sample
        >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
        >>> rng = RngKey(seed=torch.tensor([5]), position=torch.tensor([0]))
        >>> residual_sample(p, q, sampling=Sampling(), draft_sampling=Sampling(), rng=rng).token_ids
        tensor([1])
    """
    check, arguments, shards = check_residual(
        "residual_sample", target_logits, draft_logits, a, b, sampling, draft_sampling,
        token_map, allowed, edits, draft_edits, draft_ids, group, vocab_offsets, backend,
    )  # fmt: skip
    rng = check.rng(rng, target_logits.shape[0])
    arguments = (*arguments, *rng, check.choice("purpose", purpose, PURPOSES))
    return ResidualSample(*op(*arguments, device=target_logits.device, backend=backend, out=out, vocabulary=shards))
