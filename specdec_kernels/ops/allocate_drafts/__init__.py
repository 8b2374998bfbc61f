"""Which requests verify how many drafts, under one budget of tokens a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._check import ID_DTYPES, Checker, fail
from ..._codes import Backend
from ..._op import Op, Shape
from . import reference


class DraftAllocation(NamedTuple):
    """Result of `allocate_drafts`: drafts in the flat layout of `verify_chain`.

    Attributes:
        draft_ids: ``[capacity]``, dtype of the ids given: request after request, then -1. capacity is ``min(budget,
            batch * draft)``.
        cu_draft: int32 ``[batch + 1]``: drafts of request b begin at ``cu_draft[b]``.
        source: int32 ``[capacity]``: place of each in ``draft_ids.flatten()`` as given, then -1.
        num_draft: int32 ``[batch]``: drafts that request b keeps.
        status: int32 ``[batch]``, 0 or 2 (confidence) or 4 (id).
    """

    draft_ids: Tensor
    cu_draft: Tensor
    source: Tensor
    num_draft: Tensor
    status: Tensor


def _shapes(
    draft_ids: Tensor, confidence: Tensor, active: object, cost: object, budget: int, compare_all: bool
) -> tuple[Shape, ...]:  # fmt: skip
    batch, draft = draft_ids.shape
    capacity = (min(budget, batch * draft),)
    int32 = torch.int32
    return (capacity, draft_ids.dtype), ((batch + 1,), int32), (capacity, int32), ((batch,), int32), ((batch,), int32)


op = Op(reference.allocate_drafts, _shapes, results=DraftAllocation._fields)


def allocate_drafts(
    draft_ids: Tensor,
    confidence: Tensor,
    *,
    budget: int,
    cost: Tensor | None = None,
    compare_all: bool = False,
    active: Tensor | None = None,
    out: DraftAllocation | None = None,
    backend: Backend | None = None,
) -> DraftAllocation:
    """Keep the drafts of a batch that are likeliest to be accepted, at most `budget`, and no more than pay.

    Draft i of a request is accepted with probability ``P_i = c_1 c_2 ... c_i``, so this is what it adds to the expected
    number of tokens. P never rises along a draft: the n largest P of the batch are a prefix of each request, and no
    other n drafts are worth more. Ties go to the shallower draft, then to the lower request; a draft with P = 0 is
    never kept.

    Without `cost`, n is the budget. With it, drafts are added in this order as long as each raises the tokens that a
    unit of time yields,

        ``value(n) = (active requests + sum of the n largest P) / cost[n]``,

    and n = 0 is a possible end: no drafting in this step. Where each draft costs no less than the one before it, this
    is the best n. Nothing is kept or cut by what a draft's own id, or an id behind it, did to a confidence, so drafts
    that were drawn at random stay lossless (docs/budgets.md says which confidences are allowed).

    Args:
        draft_ids: int32 or int64 ``[batch, draft]``, padded with -1.
        confidence: float32 ``[batch, draft]``: probability that draft i is accepted if those before it are, in [0, 1].
            It may depend on the drafts before i. On draft i itself only if drafts are deterministic or the rule is
            ``match``: the probability of the id that was drawn biases ``ratio`` and ``block``.
        budget: most drafts of the batch, a host int.
        cost: float32 ``[at least min(budget, batch * draft) + 1]``: time of a step that verifies n drafts of this
            batch, in any unit. n is not chosen where this is not positive.
        compare_all: take the best n of all, the smallest of equals. It finds what lies behind a step of the table, but
            decides by confidences behind a draft: only for deterministic drafts, rule ``match``, or confidences that
            depend on no drawn token.
        active: bool ``[batch]``: False for a request that only pads the batch; it gets no drafts.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        DraftAllocation. A confidence that is NaN or not in [0, 1] ends the request's draft (status 2), and so does an
        id below -1 (status 4).

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import allocate_drafts
        >>> ids = torch.tensor([[5, 6, 7], [8, 9, -1]])
        >>> confidence = torch.tensor([[0.9, 0.5, 0.5], [0.6, 0.9, 0.0]])
        >>> kept = allocate_drafts(ids, confidence, budget=3)
        >>> kept.draft_ids, kept.cu_draft, kept.source
        (tensor([5, 8, 9]), tensor([0, 1, 3], dtype=torch.int32), tensor([0, 3, 4], dtype=torch.int32))
        >>> allocate_drafts(ids, confidence, budget=3, cost=torch.tensor([1.0, 1.2, 1.6, 2.0])).num_draft
        tensor([1, 0], dtype=torch.int32)
    """
    name = "allocate_drafts"
    check = Checker.of(name, "draft_ids", draft_ids, "of int32 or int64")
    batch, draft = check.dense("draft_ids", draft_ids, ID_DTYPES, ("batch", "draft")).shape
    check.dense("confidence", confidence, (torch.float32,), (batch, draft))
    check.size("budget", budget, 0)
    if not isinstance(compare_all, bool):
        fail(name, "compare_all", "True or False", repr(compare_all))
    if batch * draft >= 2**31:
        fail(name, "draft_ids", "of fewer than 2^31 ids", list(draft_ids.shape))
    if cost is not None:
        check.dense("cost", cost, (torch.float32,), ("n",))
        least = min(budget, batch * draft) + 1
        if len(cost) < least:
            fail(name, "cost", f"[at least {least}]: a time for each number of drafts from 0 on", list(cost.shape))
    elif compare_all:
        fail(name, "compare_all", "False without cost", True)
    if active is not None:
        check.vector("active", active, (torch.bool,), batch)
    arguments = (draft_ids, confidence, active, cost, budget, compare_all)
    return DraftAllocation(*op(*arguments, device=draft_ids.device, backend=backend, out=out))
