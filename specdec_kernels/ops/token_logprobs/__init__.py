"""Log-probabilities and ranks of given tokens, and the most likely ids of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ... import _shards
from ..._check import ID_DTYPES, Checker, fail
from ..._codes import LOGPROBS, RAW_LOGPROBS, Backend, Logprobs
from ..._edits import RowEdits
from ..._op import Op, Shape
from ..._scores import check_top
from ..._types import Sampling
from . import reference

MODES = {name: LOGPROBS[name] for name in get_args(Logprobs)}


class TokenLogprobs(NamedTuple):
    """Result of `token_logprobs`.

    Attributes:
        logprobs: float32 ``[rows]``, of each row's token; -inf where it has no probability, 0 where a row has no token
            or a bad id, NaN where the row is bad.
        ranks: int32 ``[rows]``: 1 + how many ids have a larger logit; 0 where a row has no token, a bad id, or is bad.
        top_ids: ``[rows, top]``, dtype of token_ids: the most likely ids, best first (ties: lowest id); -1 behind the
            last id with positive probability.
        top_logprobs: float32 ``[rows, top]``, theirs; -inf where top_ids is -1.
        status: int32 ``[rows]``: 1 bad row, 4 bad id, 64 bad sampling parameter.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    status: Tensor


def _shapes(logits: Tensor, token_ids: Tensor, top: int, *rest: Any) -> tuple[Shape, ...]:
    rows, best = logits.shape[:1], (logits.shape[0], top)
    return (
        (rows, torch.float32), (rows, torch.int32), (best, token_ids.dtype), (best, torch.float32), (rows, torch.int32),
    )  # fmt: skip


op = Op(reference.token_logprobs, _shapes, results=TokenLogprobs._fields)


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    top: int = 0,
    logprobs: Logprobs = "raw",
    sampling: Sampling | None = None,
    allowed: Tensor | None = None,
    edits: RowEdits | None = None,
    group: Any = None,
    vocab_offsets: Sequence[int] | None = None,
    out: TokenLogprobs | None = None,
    backend: Backend | None = None,
) -> TokenLogprobs:
    """Log-probability and rank of a token in each row, and the row's `top` most likely ids.

    ``log p(x) = (l(x) - max) / T - log sum exp((l - max) / T)``, the sum over the ids that filters keep. The rank is
    1 + the number of kept ids with a larger logit; ties share a rank.

    Args:
        logits: float32, bfloat16 or float16 ``[rows, vocab]``: of a prompt, or ``target_logits.flatten(0, 1)``.
        token_ids: int32 or int64 ``[rows]``; -1: the row has no token, and its most likely ids are still listed.
        top: ids to list in each row, 0 to 128.
        logprobs: ``"raw"``: of the logits as they are given; ``"processed"``: after edits, mask, temperature and
            filters. With temperature 0 the argmax has 0 and every other id -inf.
        sampling: parameters of each row, ``[rows]``; None is temperature 1 without filters. Of ``"raw"``, only
            ``active`` is read.
        allowed: int32 ``[rows, ceil(vocab / 32)]`` packed bits; only with ``"processed"``.
        edits: what `edit_rows` made of these rows; only with ``"processed"``.
        group: see `verify_chain`.
        vocab_offsets: see `verify_chain`.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        TokenLogprobs. Rows that are not active hold -1 in top_ids and 0 elsewhere.

    Raises:
        ValueError: wrong shapes, dtypes, devices or values.

    Example:
        >>> import torch
        >>> from specdec_kernels import token_logprobs
        >>> row = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log()
        >>> got = token_logprobs(row, torch.tensor([0]), top=2)
        >>> got.logprobs.exp(), got.ranks, got.top_ids
        (tensor([0.2500]), tensor([2], dtype=torch.int32), tensor([[1, 0]]))
    """
    check = Checker.of("token_logprobs", "logits", logits, "[rows, vocab]")
    check.logits("logits", logits, ("rows", "vocab"))
    rows, vocab = logits.shape
    check.dense("token_ids", token_ids, ID_DTYPES, (rows,))
    sampling = Sampling() if sampling is None else check.sampling("sampling", sampling, rows)
    mode = check.choice("logprobs", logprobs, MODES)
    check_top(check, top, mode)
    if mode == RAW_LOGPROBS:
        for name, value in (("allowed", allowed), ("edits", edits)):
            if value is not None:
                fail("token_logprobs", name, 'None with logprobs="raw", which takes the logits as given', "a value")
        sampling = Sampling(active=sampling.active)
    shards = _shards.shards_of("token_logprobs", group, vocab_offsets, vocab, backend)
    allowed = check.allowed(allowed, rows, vocab if shards is None else shards.size)
    edited = check.edits("edits", edits, rows, vocab)
    arguments = (logits, token_ids, top, *sampling, allowed, *edited)
    return TokenLogprobs(*op(*arguments, device=logits.device, backend=backend, out=out, vocabulary=shards))
