"""Draw tokens from raw logits, with everything a verifier needs later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ... import _shards
from ..._check import LOGIT_DTYPES, Checker, fail
from ..._codes import LOGPROBS, PURPOSES, Backend, DrawPurpose, Logprobs
from ..._edits import RowEdits
from ..._op import Op, Shape
from ..._scores import check_top, listed_shapes, run_listed
from ..._sparse import MAX_KEPT, SparseRows
from ..._types import RngKey, Sampling
from . import reference

DRAWS = {name: PURPOSES[name] for name in get_args(DrawPurpose)}
MODES = {name: LOGPROBS[name] for name in get_args(Logprobs)}
MAX_SAMPLES = 64  # a GPU tile keeps its best n in registers


class SampleResult(NamedTuple):
    """Result of `sample`.

    Attributes:
        token_ids: int64 ``[batch, num_samples]`` in the order drawn; -1 where the distribution has fewer ids, or a bad
            row.
        logprobs: float32 ``[batch, num_samples]``; 0 where token_ids is -1.
        logsumexp: float32 ``[batch]``, log-sum of the scaled kept logits; 0 for a greedy request.
        threshold: float32 ``[batch]``, smallest raw logit that is kept (-inf: all). With logsumexp it is draft_stats.
        status: int32 ``[batch]``: 1 bad row, 64 bad sampling parameter.
        ranks: int32 ``[batch, 1]``: 1 + how many ids have a larger logit than the token; 0 where token_ids is -1; None
            without `top`.
        top_ids: int64 ``[batch, 1, top]``: the most likely ids of the row, as of `token_logprobs`.
        top_logprobs: float32 ``[batch, 1, top]``, theirs; 0 where token_ids is -1.
    """

    token_ids: Tensor
    logprobs: Tensor
    logsumexp: Tensor
    threshold: Tensor
    status: Tensor
    ranks: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def keep(self, logits: Tensor, k: int, *, token_map: Tensor | None = None) -> SparseRows:
        """The k largest logits of each row with the row's logsumexp: `draft_logits` of a verifier, without the rest.

        All that the filters kept must be among them, ties too; otherwise the verifier flags the row.

        Args:
            logits: those that were sampled from; with `edits` or `allowed` as these changed them.
            k: candidates of a row, at most 1024.
            token_map: as given to `sample`.

        Returns:
            SparseRows of ``[batch, k]``; -1 where the filters kept fewer. k is at most the number of columns.

        Raises:
            ValueError: wrong shapes, dtypes, devices or values.

        Example:
            >>> import torch
            >>> from specdec_kernels import RngKey, Sampling, sample
            >>> logits, top = torch.tensor([[1.0, 3.0, 2.0]]), Sampling.full(1, top_k=2)
            >>> rng = RngKey(seed=torch.tensor([3]), position=torch.tensor([11]))
            >>> sample(logits, sampling=top, rng=rng, purpose="draft").keep(logits, 3).ids
            tensor([[ 1,  2, -1]])
        """
        check = Checker("SampleResult.keep", self.threshold.device)
        check.tensor("logits", logits, LOGIT_DTYPES, (len(self.threshold), "vocab"))
        if check.size("k", k, 1) > MAX_KEPT:
            fail(check.op, "k", f"at most {MAX_KEPT}", k)
        if token_map is not None:
            check.dense("token_map", token_map, (torch.int32,), (logits.shape[1],))
        values, ids = logits.topk(min(k, logits.shape[1]), dim=1)
        kept = (values >= self.threshold[:, None]) & (values > -float("inf"))
        ids = ids if token_map is None else token_map[ids]
        return SparseRows(torch.where(kept, ids, -1), torch.where(kept, values, -float("inf")), self.logsumexp)


def _shapes(logits: Tensor, *rest: Any) -> tuple[Shape, ...]:
    batch, drawn = logits.shape[:1], (logits.shape[0], rest[9])
    return (
        (drawn, torch.int64), (drawn, torch.float32), (batch, torch.float32), (batch, torch.float32),
        (batch, torch.int32),
    )  # fmt: skip


op = Op(reference.sample, _shapes, results=SampleResult._fields[:5])
listed = Op(reference.sample_listed, partial(listed_shapes, _shapes), results=SampleResult._fields, backends=("cpu",))


def sample(
    logits: Tensor,
    *,
    sampling: Sampling,
    rng: RngKey,
    purpose: DrawPurpose,
    num_samples: int = 1,
    lane: int | Tensor = 0,
    exclude_ids: Tensor | None = None,
    token_map: Tensor | None = None,
    logprobs: Logprobs = "processed",
    top: int | None = None,
    allowed: Tensor | None = None,
    edits: RowEdits | None = None,
    group: Any = None,
    vocab_offsets: Sequence[int] | None = None,
    out: SampleResult | None = None,
    backend: Backend | None = None,
) -> SampleResult:
    """Draw `num_samples` distinct ids a row from ``softmax(logits / temperature)`` after the filters.

    The draw is a race: the id with the largest ``logit / T - log E(id)`` wins, with E from Philox of (seed, position,
    step, purpose, id). The best n of one race are n draws without replacement, in order.

    Args:
        logits: float32, bfloat16 or float16 ``[batch, vocab]``.
        sampling: parameters of each request; temperature 0 takes the argmax (ties: lowest id).
        rng: seed and position of the drawn token. Draft token i of a request has ``position + i``.
        purpose: ``"target"`` (plain decoding, and drafts under rule ``match``), ``"draft"`` (drafts under the other
            rules) or ``"residual"``. ``"target"`` never looks at ``rng.step``.
        num_samples: ids a row, at most 64.
        lane: 0 in a chain; int or int64 ``[batch]``, see docs/design.md, Random numbers.
        exclude_ids: int64 ``[batch, n]`` ids that are not drawn, -1 padded; the statistics still count them.
        token_map: int32 ``[vocab]``: target id of each column; noise is indexed by it and it is what is returned.
        logprobs: ``"processed"`` or ``"raw"``.
        top: how many of the most likely ids to list beside one drawn id, 0 to 128; its rank comes with them. Not with
            `token_map`.
        allowed: int32 ``[batch, ceil(vocab / 32)]`` packed bits of the columns that may be drawn; before filters.
        edits: what `edit_rows` made of these rows; not together with `token_map`, since edits name ids.
        group: see `verify_chain`; token_map then belongs to this rank's columns.
        vocab_offsets: see `verify_chain`.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        SampleResult; its ``(logsumexp, threshold)`` are the draft_stats of `verify_chain`.

    Raises:
        ValueError: wrong shapes, dtypes, devices or values.

    Example:
        >>> import torch
        >>> from specdec_kernels import RngKey, Sampling, sample
        >>> rng = RngKey(seed=torch.tensor([3]), position=torch.tensor([11]))
        >>> sample(torch.tensor([[0.0, 30.0]]), sampling=Sampling(), rng=rng, purpose="target").token_ids
        tensor([[1]])
    """
    check = Checker.of("sample", "logits", logits, "[batch, vocab]")
    check.logits("logits", logits, ("batch", "vocab"))
    batch, vocab = logits.shape
    sampling = check.sampling("sampling", sampling, batch)
    rng = check.rng(rng, batch)
    code = check.choice("purpose", purpose, DRAWS)
    mode = check.choice("logprobs", logprobs, MODES)
    if not isinstance(num_samples, int) or not 1 <= num_samples <= MAX_SAMPLES:
        fail("sample", "num_samples", f"an int in [1, {MAX_SAMPLES}]", repr(num_samples))
    lanes = check.lanes(lane, batch)
    if exclude_ids is not None:
        exclude_ids = check.dense("exclude_ids", exclude_ids, (torch.int64,), (batch, "n"))
    if token_map is not None:
        token_map = check.dense("token_map", token_map, (torch.int32,), (vocab,))
    shards = _shards.shards_of("sample", group, vocab_offsets, vocab, backend)
    allowed = check.allowed(allowed, batch, vocab if shards is None else shards.size)
    if edits is not None and token_map is not None:
        fail("sample", "edits", "None where token_map is given: edits name ids, not columns", "RowEdits")
    edited = check.edits("edits", edits, batch, vocab)
    arguments = (logits, *sampling, *rng, code, num_samples, lanes, exclude_ids, token_map, allowed, *edited, mode)
    which, first = (op, ()) if top is None else (listed, (check_top(check, top, mode),))
    if top is not None and num_samples != 1:
        fail("sample", "num_samples", "1 with top", num_samples)
    if top is not None and token_map is not None:
        fail("sample", "token_map", "None with top: columns are listed, not the ids it gives them", "a tensor")
    given: Any = out[: len(which.results)] if isinstance(out, SampleResult) else out
    run = op if top is None else partial(run_listed, op, listed)
    return SampleResult(*run(*first, *arguments, device=logits.device, backend=backend, out=given, vocabulary=shards))
