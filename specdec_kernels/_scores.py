"""What is told of a token beside its id: log-probability, rank, and the likeliest ids of its row. Plain PyTorch.

An op that draws or verifies tells it of the tokens it emits. A backend that can do so in the same pass has an operator
of its own for that, `<op>_listed`; elsewhere the op and then `token_logprobs` are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _backends, _rows, _vocabulary
from ._check import Checker, fail
from ._codes import CHAIN_RULES, RAW_LOGPROBS, TREE_RULES, Status
from ._edits import RowEdits
from ._op import OPS, Op, Shape, Tensors
from ._types import ChainArguments, SampleArguments, Sampling, TreeArguments
from ._vocabulary import Table, Vocabulary
from ._walks import ARGMAX_RULES

_INF = float("inf")
MAX_TOP = 128  # engines offer 20; more would be a sort
LISTING = ("ranks", "top_ids", "top_logprobs")  # results of an op that lists, behind its others

# (logits, token_ids, top, sampling, allowed, edits) -> results of token_logprobs
Score = Callable[[Tensor, Tensor, int, Sampling, Tensor | None, RowEdits], Tensors]


def check_top(check: Checker, top: Any, mode: int) -> int:
    """How many ids are listed, with log-probabilities of a mode."""
    if not mode:
        fail(check.op, "top", "None without logprobs", top)
    if not isinstance(top, int) or not 0 <= top <= MAX_TOP:
        fail(check.op, "top", f"an int in [0, {MAX_TOP}]", repr(top))
    return top


def listing_shapes(tokens: Shape, top: int) -> tuple[Shape, ...]:
    """Shapes of LISTING, given that of the tokens."""
    places, dtype = tokens
    return (places, torch.int32), ((*places, top), dtype), ((*places, top), torch.float32)


def listed_shapes(shapes_of: Callable[..., tuple[Shape, ...]], top: int, *args: Any) -> tuple[Shape, ...]:
    """Shapes of the results of `<op>_listed`, given what gives those of the op."""
    shapes = shapes_of(*args)
    return *shapes, *listing_shapes(shapes[0], top)


def score(
    vocabulary: Vocabulary | None, logits: Tensor, token_ids: Tensor, top: int, sampling: Sampling,
    allowed: Tensor | None, edits: RowEdits,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Results of `token_logprobs`; a part of a `vocabulary` takes 2 exchanges, 4 with filters."""
    vocabulary = vocabulary or Vocabulary(logits.shape[-1])
    parameter = _rows.parameters(len(logits), logits.device, sampling)
    outside = (token_ids < -1) | (token_ids >= vocabulary.size)
    has = (token_ids >= 0) & ~outside
    table = Table(_rows.edited(vocabulary.pad(logits), allowed, edits, vocabulary.first), parameter)
    mine = has & (token_ids >= vocabulary.first) & (token_ids < vocabulary.end)
    column = torch.where(mine, token_ids.long() - vocabulary.first, 0)[:, None]
    (row,), (found,) = vocabulary.distributions(
        [table], torch.where(mine, table.logits.gather(1, column)[:, 0], -_INF)
    )()  # fmt: skip
    own = found.amax(0)
    is_kept = torch.where(row.greedy, token_ids == row.argmax, own >= row.threshold)
    own = torch.where(has & is_kept, own, -_INF)[:, None]

    kept = torch.where(row.kept & ~row.bad[:, None], row.logits, -_INF)
    larger = (kept > own).sum(1, dtype=torch.int32)
    best, ids, _ = _vocabulary.best(kept, vocabulary.columns(logits.device), kept, top)
    ahead, best, ids = vocabulary.send(larger, best, ids)()
    rank = 1 + _vocabulary.added(ahead)
    listed = _vocabulary.winner(best, ids, best)
    there = listed.ids >= 0

    status = torch.where(parameter.bad, Status.BAD_SAMPLING, 0)
    status = status | torch.where(row.bad, Status.BAD_TARGET, 0) | torch.where(outside, Status.BAD_ID, 0)
    return (
        _rows.of_active(sampling, torch.where(has, row.logprob(own)[:, 0], 0.0)),
        _rows.of_active(sampling, torch.where(has & ~row.bad, rank, 0).int()),
        _rows.of_active(sampling, listed.ids.to(token_ids.dtype), -1),
        _rows.of_active(sampling, torch.where(there, row.logprob(listed.logit), -_INF)),
        _rows.of_active(sampling, status.int()),
    )


def _source_rows(given: SampleArguments | ChainArguments | TreeArguments, emitted: Tensors) -> Tensor:
    """The row of logits that each token was taken from, int64 [batch, tokens]."""
    device = emitted[0].device
    column = torch.arange(emitted[0].shape[1], device=device)
    if isinstance(given, TreeArguments):  # the root's, then those of the path
        path, (batch, nodes) = emitted[1], given.parents.shape
        node = torch.nn.functional.pad(path[:, :-1].long(), (1, 0))
        return torch.arange(batch, device=device)[:, None] * nodes + node
    request = torch.arange(len(emitted[0]), device=device)
    if isinstance(given, SampleArguments):
        return request[:, None].expand(-1, len(column))
    if given.cu_draft is None:
        return request[:, None] * len(column) + column
    return (given.cu_draft[:-1].long() + request)[:, None] + column


def list_tokens(
    score: Score, given: SampleArguments | ChainArguments | TreeArguments, top: int, emitted: Tensors
) -> tuple[Tensor, Tensor, Tensor]:
    """LISTING of the tokens that an op emitted, each from a row of its own. No other row is read."""
    token_ids, rows = emitted[0], _source_rows(given, emitted)
    sampling, allowed, edits = given.sampling, given.allowed, given.edits
    logits = given.logits if isinstance(given, SampleArguments) else given.target_logits
    logits = logits.flatten(0, 1) if logits.dim() == 3 else logits
    if given.logprobs_mode == RAW_LOGPROBS:
        sampling, allowed, edits = Sampling(), None, RowEdits()
    elif not isinstance(given, SampleArguments):
        names = CHAIN_RULES if isinstance(given, ChainArguments) else TREE_RULES
        sampling = Sampling() if tuple(names)[given.rule] in ARGMAX_RULES else sampling
    has = token_ids >= 0
    place = torch.where(has, rows, len(logits)).flatten()
    of_row = torch.zeros(len(logits) + 1, dtype=torch.int64, device=rows.device)  # its place in the results
    of_row = of_row.scatter(0, place, torch.arange(rows.numel(), device=rows.device))[:-1]
    ids = token_ids.new_full((len(logits) + 1,), -1).scatter(0, place, token_ids.flatten())[:-1]
    request = of_row // rows.shape[1]
    sampling = Sampling(*(None if part is None else part[request] for part in sampling))._replace(active=ids >= 0)
    _, ranks, top_ids, top_logprobs, _ = score(logits, ids, top, sampling, allowed, edits)
    row = torch.where(has, rows, 0)
    return (
        torch.where(has, ranks[row], 0),
        torch.where(has[..., None], top_ids[row], -1),
        torch.where(has[..., None], top_logprobs[row], 0.0),
    )


def run_listed(
    op: Op, listed: Op, *args: Any, device: torch.device, backend: str | None, out: Tensors | None,
    vocabulary: Vocabulary | None, **more: Any,
) -> Tensors:  # fmt: skip
    """`listed`; where the backend lacks it `op`, whose arguments are all but the first, and then `token_logprobs`."""
    chosen = "reference" if vocabulary else _backends.choose(op.name, op.backends, device, backend)
    if chosen in ("reference", *listed.backends):
        done: Tensors = listed(*args, device=device, backend=chosen, out=out, vocabulary=vocabulary, **more)
        return done
    top, *others = args
    emitted: Tensors = op(*others, device=device, backend=chosen)
    (given,) = op.structured(others)

    def score(
        logits: Tensor, ids: Tensor, top: int, sampling: Sampling, allowed: Tensor | None, edits: RowEdits
    ) -> Tensors:
        scored: Tensors = OPS["token_logprobs"](
            logits, ids, top, *sampling, allowed, *edits, device=device, backend=chosen
        )
        return scored

    listing = list_tokens(score, given, top, emitted)
    delivered: Tensors = listed.deliver(args, (*emitted, *listing), out)
    return delivered
