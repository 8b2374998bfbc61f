"""Counts of the tokens of each text, kept on the device for penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._check import ID_DTYPES, Checker, fail
from ..._codes import Backend
from ..._edits import TokenCounts
from ..._op import Op, Shape
from . import reference


def _shapes(
    counted_ids: Tensor, counts: Tensor, token_ids: Tensor, slots: Tensor | None, amount: int
) -> tuple[Shape, ...]:  # fmt: skip
    return ((token_ids.shape[:1], torch.int32),)


op = Op(reference.count_tokens, _shapes, results=("status",), mutates=("counted_ids", "counts"))


def count_tokens(
    counts: TokenCounts,
    token_ids: Tensor,
    *,
    slots: Tensor | None = None,
    is_prompt: bool = False,
    undo: bool = False,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Count tokens that a request's text now has, in place: its prompt once, then what each step emitted.

    The result of a step may be passed as it is: its ids end with -1.

    Args:
        counts: the tables (see `TokenCounts.empty`); written.
        token_ids: int32 or int64 ``[batch, n]``; what is negative or above 2^31 - 1 is no token.
        slots: int32 ``[batch]``: the slot of each request, all different; -1 leaves a request out. None: its row.
        is_prompt: the tokens are the prompt's: the repetition penalty sees them, the other two do not.
        undo: take the tokens back: the text was cut. Only what was counted before may be taken back.
        out: preallocated result.
        backend: see `verify_chain`.

    Returns:
        int32 ``[batch]`` status: 32 where a slot is out of range, or its table was full and a token was not counted.

    Raises:
        ValueError: wrong shapes, dtypes, devices or combinations.

    Example:
        >>> import torch
        >>> from specdec_kernels import TokenCounts, count_tokens
        >>> counts = TokenCounts.empty(1, 100)
        >>> count_tokens(counts, torch.tensor([[5, 7, 5]]), is_prompt=True)
        tensor([0], dtype=torch.int32)
        >>> count_tokens(counts, torch.tensor([[7, 9, -1]]))
        tensor([0], dtype=torch.int32)
        >>> counts.of(0)
        {5: (0, True), 7: (1, True), 9: (1, False)}
    """
    name = "count_tokens"
    check = Checker.of(name, "token_ids", token_ids, "of int32 or int64")
    check.dense("token_ids", token_ids, ID_DTYPES, ("batch", "n"))
    check.token_counts("counts", counts)
    if counts.token_ids is None or counts.token_counts is None:
        fail(name, "counts", "a TokenCounts with tables (see TokenCounts.empty)", None)
    batch = token_ids.shape[0]
    if slots is not None:
        check.vector("slots", slots, (torch.int32,), batch)
    elif counts.token_ids.shape[0] < batch:
        fail(name, "slots", "given where counts has fewer slots than requests", None)
    if is_prompt and undo:
        fail(name, "undo", "False for a prompt", True)
    amount = 1 if is_prompt else -2 if undo else 2
    status: Tensor = op(
        counts.token_ids, counts.token_counts, token_ids, slots, amount,
        device=token_ids.device, backend=backend, out=out,
    )  # fmt: skip
    return status
