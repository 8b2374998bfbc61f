"""Verify a chain of drafted tokens from raw logits: accepted prefix plus one drawn token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _shards
from ..._check import NO_KEPT, Checker, fail, outputs
from ..._codes import CHAIN_RULES, LOGPROBS, REJECTED_FROM, Backend, ChainRule, Logprobs, RejectedFrom
from ..._edited import NO_EDITS_GIVEN, Layout, edited_shapes, edits_given, nothing_listed
from ..._edits import Edits, RowEdits
from ..._mixed_rules import MixedRules, calls_of, merged, rule_names, with_knobs
from ..._op import Op, Shape, Tensors
from ..._scores import check_top, listed_shapes, run_listed
from ..._sparse import SparseRows
from ..._types import RngKey, Sampling
from . import reference


class ChainResult(NamedTuple):
    """Result of `verify_chain`.

    Attributes:
        token_ids: ``[batch, draft + 1]``, dtype of draft_ids: accepted prefix, exactly one drawn token, then -1.
        num_accepted: int32 ``[batch]``, the drawn token not counted.
        status: int32 ``[batch]``, 0 or the bits of docs/design.md, section Bad input.
        logprobs: float32 ``[batch, draft + 1]``, 0 where token_ids is -1; None unless asked for.
        ranks: int32 ``[batch, draft + 1]``: 1 + how many ids have a larger logit than the token; 0 where token_ids is
            -1; None without `top`.
        top_ids: ``[batch, draft + 1, top]``: the most likely ids of each token's row, as of `token_logprobs`.
        top_logprobs: float32 ``[batch, draft + 1, top]``, theirs; 0 where token_ids is -1.
    """

    token_ids: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor | None
    ranks: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def _shapes(draft_ids: Tensor, target_logits: Tensor, *rest: Any) -> tuple[Shape, ...]:
    cu_draft, max_draft, logprobs_mode = rest[3], rest[4], rest[-1]
    batch = draft_ids.shape[0] if cu_draft is None else cu_draft.shape[0] - 1
    shape = (batch, max_draft + 1)
    return (
        (shape, draft_ids.dtype), ((batch,), torch.int32), ((batch,), torch.int32),
        (shape if logprobs_mode else (0,), torch.float32),
    )  # fmt: skip


_listed_shapes, _edited_shapes = partial(listed_shapes, _shapes), partial(edited_shapes, _shapes)
op = Op(reference.verify_chain, _shapes, results=ChainResult._fields[:4])
listed = Op(reference.verify_chain_listed, _listed_shapes, results=ChainResult._fields, backends=("cpu",))
edited = Op(reference.verify_chain_edited, _edited_shapes, results=ChainResult._fields, backends=("cpu",))


def verify_chain(
    draft_ids: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | SparseRows | None = None,
    *,
    draft_stats: tuple[Tensor, Tensor] | None = None,
    cu_draft: Tensor | None = None,
    max_draft: int | None = None,
    sampling: Sampling,
    draft_sampling: Sampling | None = None,
    rng: RngKey,
    rule: ChainRule | MixedRules = "ratio",
    over_acceptance: float | Tensor | None = None,
    rejected_from: RejectedFrom = "residual",
    token_map: Tensor | None = None,
    allowed: Tensor | None = None,
    edits: Edits | RowEdits | None = None,
    draft_edits: Edits | RowEdits | None = None,
    typical_epsilon: float | Tensor = 0.09,
    typical_delta: float | Tensor = 0.3,
    top_m: int = 1,
    max_distance: int = 0,
    min_block: int = 1,
    logprobs: Logprobs | None = None,
    top: int | None = None,
    group: Any = None,
    vocab_offsets: Sequence[int] | None = None,
    out: ChainResult | None = None,
    backend: Backend | None = None,
) -> ChainResult:
    """Accept a prefix of the drafted tokens and draw the next token; the output follows the target distribution.

    With p the target distribution and q the draft distribution (both after their own sampling parameters), rule
    ``ratio`` accepts draft x iff ``u q(x) < p(x)`` and draws the token after the first rejection from ``norm((p -
    q)+)``. After a fully accepted draft the token comes from the next target row. Rules ``ratio``, ``match`` and
    ``block`` leave the output distribution exactly the target's; ``greedy`` equals greedy decoding; ``typical``,
    ``topm`` and ``distance`` are lossy.

    Args:
        draft_ids: int32 or int64 ``[batch, draft]``, padded with -1; or ``[total]`` with `cu_draft`.
        target_logits: float32, bfloat16 or float16 ``[batch, draft + 1, vocab]``, or ``[total + batch, vocab]`` where
            request b starts at row ``cu_draft[b] + b``. Row i is the distribution of draft token i; the last is the
            bonus row.
        draft_logits: ``[batch, draft, draft_vocab]`` or ``[total, draft_vocab]``; `SparseRows` of ``[batch, draft, k]``
            or ``[total, k]`` where only candidates were kept; None: the drafts are deterministic.
        draft_stats: ``(logsumexp, threshold)``, float32 ``[batch, draft]`` or ``[total]``, as `sample` returned them;
            rule ``ratio`` then reads a draft row only where it rejected.
        cu_draft: int32 ``[batch + 1]``, leading 0: flat layout.
        max_draft: longest draft of the batch, a host int; needed with `cu_draft`.
        sampling: the target's sampling parameters.
        draft_sampling: exactly those the drafts were drawn with; required with `draft_logits`. Temperature 0 is a
            point mass at the drafted id, whose row is not read. With `SparseRows` a temperature alone.
        rng: names the random numbers. Draft token i has ``position + i``. Rule ``block`` requires ``step``.
        rule: ``ratio``, ``match``, ``block``, ``greedy``, ``typical``, ``topm`` or ``distance``. ``greedy``, ``topm``
            and ``distance`` are rules of argmax decoding and read no sampling parameter. `MixedRules` has one for each
            request.
        over_acceptance: adds to p in rule ``ratio`` (lossy, Pareto-optimal in total variation; Yin et al. 2024); a
            number in [0, 1], or float32 ``[batch]``.
        rejected_from: ``"residual"``, or ``"target"`` to draw a rejected position from p (biased; rule ``ratio``).
        token_map: int32 ``[draft_vocab]``: target id of each draft column, injective.
        allowed: int32 ``[target rows, ceil(vocab / 32)]``: bit v % 32 of word v // 32 allows id v; before filters.
        edits: biases, penalties and bans of each request: its `Edits`, or what `edit_rows` made of the target rows. On
            the CPU `Edits` cost less: those of a row are made when the row is read.
        draft_edits: the edits that the drafts were drawn with, numbered as target rows: mostly the same ones, since
            draft row i follows the same text as target row i. Not with `token_map`.
        typical_epsilon: rule ``typical`` accepts x iff ``p(x) > min(epsilon, delta exp(-entropy))``; a number, or
            float32 ``[batch]``. A request whose number is NaN or negative is decoded greedily, as with a bad
            temperature.
        typical_delta: see `typical_epsilon`.
        top_m: rule ``topm`` accepts an id among the m largest logits.
        max_distance: rule ``distance`` accepts ``|x - argmax| <= max_distance``.
        min_block: rules ``topm`` and ``distance`` accept the first ``min_block - 1`` drafts anyway (Stern et al.).
        logprobs: ``"processed"`` (distribution after temperature and filters) or ``"raw"`` (softmax of the logits as
            given).
        top: with `logprobs`, how many of the most likely ids to list for each token, 0 to 128; ranks come with them.
        group: a torch.distributed process group whose ranks hold the vocabulary in parts (tensor parallelism); every
            rank calls with the logits of its own ids and else the same arguments, and returns the same bits. Ranks
            exchange numbers about rows, never rows (docs/engines.md). Draft columns, or the ids that token_map gives
            them, are those of the same rank; `allowed` has the bits of the whole vocabulary.
        vocab_offsets: with `group`, world size + 1 ints: the first id of each rank, then the size of the vocabulary.
        out: preallocated results.
        backend: ``"reference"``, ``"cpu"``, ``"triton"`` or ``"cuda"``; by default the best for the device.

    Returns:
        ChainResult. Bad rows and ids never raise and never harm another request: see its `status`.

    Raises:
        ValueError: wrong shapes, dtypes, devices or combinations, before anything is launched.

    Example:
        >>> import torch
        >>> from specdec_kernels import RngKey, Sampling, verify_chain
        >>> logits = torch.tensor([[[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]]])
        >>> rng = RngKey(seed=torch.tensor([1]), position=torch.tensor([0]))
        >>> greedy = Sampling.full(1, temperature=0.0)
        >>> verify_chain(torch.tensor([[1]]), logits, sampling=greedy, rng=rng).token_ids
        tensor([[1, 0]])
    """
    name = "verify_chain"
    check = Checker.of(name, "draft_ids", draft_ids, "of int32 or int64")
    mode = check.choice("logprobs", logprobs, LOGPROBS)
    batch, width = check.chain_ids(draft_ids, cu_draft, max_draft)
    rules = rule_names(check, rule, CHAIN_RULES, batch)
    vocab = check.chain_rows("target_logits", target_logits, draft_ids, cu_draft, width, bonus=True)
    draft_vocab, kept = vocab, NO_KEPT
    if isinstance(draft_logits, SparseRows):
        refused = {"draft_stats": draft_stats, "token_map": token_map, "draft_edits": draft_edits}
        draft_logits, kept = check.sparse(draft_logits, tuple(draft_ids.shape), draft_sampling, refused)
    elif draft_logits is not None:
        draft_vocab = check.chain_rows("draft_logits", draft_logits, draft_ids, cu_draft, width, bonus=False)
    if draft_logits is not None and draft_sampling is None:
        fail(name, "draft_sampling", "given with draft_logits: the distribution the drafts were drawn from", None)
    token_map = check.token_map(token_map, draft_vocab, vocab)
    sampling = check.sampling("sampling", sampling, batch)
    drafted = check.draft_sampling(draft_sampling, batch)
    rng = check.rng(rng, batch)
    stats: tuple[Tensor | None, Tensor | None] = (None, None)
    if draft_stats is not None:
        if draft_logits is None:
            fail(name, "draft_logits", "given with draft_stats", None)
        given_stats: Any = draft_stats
        if not isinstance(given_stats, (tuple, list)) or len(given_stats) != 2:
            count = f" of {len(given_stats)}" if isinstance(given_stats, (tuple, list)) else ""
            got = f"{type(given_stats).__name__}{count}"
            fail(name, "draft_stats", "two tensors (logsumexp, threshold), as sample returned them", got)
        stats = (
            check.dense("draft_stats[0]", draft_stats[0], (torch.float32,), draft_ids.shape),
            check.dense("draft_stats[1]", draft_stats[1], (torch.float32,), draft_ids.shape),
        )
    shards = _shards.shards_of(name, group, vocab_offsets, vocab, backend)
    rows = draft_ids.shape[0] + batch if cu_draft is not None else batch * (width + 1)
    allowed = check.allowed(allowed, rows, vocab if shards is None else shards.size)
    both = NO_EDITS_GIVEN
    if edits is not None or draft_edits is not None:
        both = edits_given(
            op, edited, check.edits("edits", edits, rows, vocab, batch),
            check.draft_edits(draft_edits, draft_logits, rows, token_map, batch),
            Layout(draft_ids, None, cu_draft, width), vocab, active=sampling.active, shards=shards, backend=backend,
        )  # fmt: skip
    if "block" in rules and rng.step is None:
        fail(name, "rng.step", "given for rule 'block': position alone biases it", None)
    if over_acceptance is not None and "ratio" not in rules:
        fail(name, "over_acceptance", "None unless the rule is 'ratio'", f"{over_acceptance!r} with {rule!r}")
    over, overs = check.knob("over_acceptance", 0.0 if over_acceptance is None else over_acceptance, batch, 1)
    from_target = bool(check.choice("rejected_from", rejected_from, REJECTED_FROM))
    if from_target and "ratio" not in rules:
        fail(name, "rejected_from", "'residual' unless the rule is 'ratio'", repr(rejected_from))
    check.size("top_m", top_m, 1)
    check.size("min_block", min_block, 1)
    check.size("max_distance", max_distance, 0)
    typical = check.typical(typical_epsilon, typical_delta, batch)
    which, first = (op, ()) if top is None else (listed, (check_top(check, top, mode),))
    if extras := both.extras(top):
        which, first = edited, extras
    given = outputs(name, out, ChainResult, "logprobs", torch.float32, is_wanted=bool(mode))
    told = len(op.results if top is None else listed.results)
    if given is not None:
        given = (*given[:told], *(nothing_listed(draft_ids) if which is edited and top is None else ()))

    into = None if isinstance(rule, MixedRules) else given
    run = partial(run_listed, op, listed) if which is listed else which
    done: list[Tensors] = []
    for one, its in calls_of(rule, sampling):
        its, own, *limits = with_knobs(its, overs if one == "ratio" else None, *typical.of_requests(one))
        args = (
            *first, draft_ids, target_logits, draft_logits, *stats, cu_draft, width, *its, *drafted, *rng,
            CHAIN_RULES[one], over, own, from_target and one == "ratio", token_map, *kept, allowed, *both.rows,
            *both.draft_rows, *typical[:2], *limits, top_m, max_distance, min_block, mode,
        )  # fmt: skip
        done.append(run(*args, device=draft_ids.device, backend=backend, out=into, vocabulary=shards))
    results = merged(which, rule, sampling, args, done, given) if isinstance(rule, MixedRules) else done[0]
    token_ids, num_accepted, status, logprob, *listing = results[:told]
    return ChainResult(token_ids, num_accepted, status, logprob if mode else None, *listing)
