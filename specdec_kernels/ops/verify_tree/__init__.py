"""Verify a tree of candidates from raw logits: one accepted path plus one drawn token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _shards
from ..._check import ID_DTYPES, NO_KEPT, SIZE_BITS, Checker, fail, outputs
from ..._codes import LOGPROBS, TREE_RULES, Backend, Logprobs, TreeRule
from ..._edited import NO_EDITS_GIVEN, Layout, edited_shapes, edits_given, nothing_listed
from ..._edits import Edits, RowEdits
from ..._mixed_rules import MixedRules, calls_of, merged, rule_names, with_knobs
from ..._op import Op, Shape, Tensors
from ..._scores import check_top, listed_shapes, run_listed
from ..._sparse import SparseRows
from ..._types import RngKey, Sampling
from . import reference

MAX_TRAVERSAL_NODES = 64  # one block a request keeps them


class TreeResult(NamedTuple):
    """Result of `verify_tree`.

    Attributes:
        token_ids: ``[batch, max_depth + 1]``, dtype of the ids given: accepted path, exactly one drawn token, then -1.
        path: int32 ``[batch, max_depth + 1]``: accepted nodes without the root, then -1.
        num_accepted: int32 ``[batch]``, neither the root nor the drawn token counted.
        status: int32 ``[batch]``, 0 or the bits of docs/design.md, section Bad input.
        logprobs: float32 ``[batch, max_depth + 1]``, 0 where token_ids is -1; None unless asked for.
        ranks: int32 ``[batch, max_depth + 1]``; this and what follows as in `ChainResult`; None without `top`.
        top_ids: ``[batch, max_depth + 1, top]``.
        top_logprobs: float32 ``[batch, max_depth + 1, top]``.
    """

    token_ids: Tensor
    path: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor | None
    ranks: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def _shapes(token_ids: Tensor, *rest: Any) -> tuple[Shape, ...]:
    max_depth, mode = rest[3], rest[-1]
    batch, shape = token_ids.shape[:1], (token_ids.shape[0], max_depth + 1)
    return (
        (shape, token_ids.dtype), (shape, torch.int32), (batch, torch.int32), (batch, torch.int32),
        (shape if mode else (0,), torch.float32),
    )  # fmt: skip


_listed_shapes, _edited_shapes = partial(listed_shapes, _shapes), partial(edited_shapes, _shapes)
op = Op(reference.verify_tree, _shapes, results=TreeResult._fields[:5])
listed = Op(reference.verify_tree_listed, _listed_shapes, results=TreeResult._fields, backends=("cpu",))
edited = Op(reference.verify_tree_edited, _edited_shapes, results=TreeResult._fields, backends=("cpu",))


def verify_tree(
    token_ids: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | SparseRows | None = None,
    *,
    max_depth: int,
    sampling: Sampling,
    draft_sampling: Sampling | None = None,
    rng: RngKey,
    rule: TreeRule | MixedRules = "match",
    replacement: bool = False,
    token_map: Tensor | None = None,
    allowed: Tensor | None = None,
    edits: Edits | RowEdits | None = None,
    draft_edits: Edits | RowEdits | None = None,
    typical_epsilon: float | Tensor = 0.09,
    typical_delta: float | Tensor = 0.3,
    logprobs: Logprobs | None = None,
    top: int | None = None,
    group: Any = None,
    vocab_offsets: Sequence[int] | None = None,
    max_children: int | None = None,
    out: TreeResult | None = None,
    backend: Backend | None = None,
) -> TreeResult:
    """Accept a path of the tree and draw the token after it, so that the output follows the target's distribution.

    Which rule fits depends on how the children of a node were chosen; a wrong pairing is biased. With p and q the
    distributions of the node's target and draft row:

    * ``match``: children however chosen, best where deterministic. The seeded draw from p is looked for among them.
    * ``target_only``: deterministic children. One coin against the cumulative p of the children (SGLang).
    * ``recursive``: children drawn from q without replacement, in node order; independently, with `replacement`; or
      deterministic. Each is accepted iff ``u q < p``, both corrected after each rejection (SpecInfer, Sequoia, EAGLE).
    * ``greedy_multi_draft``: deterministic children, and as the last one a draw from q without them (Hu et al.). Ratio
      test of the last; after a rejection the corrected draw is looked for among the others.
    * ``traversal``: children as for ``recursive`` without replacement. Leaves first, joint weights (Weng et al.); at
      most 64 nodes.
    * ``greedy``: the argmax is looked for. Greedy decoding.
    * ``typical``: x is accepted iff ``p(x) > min(epsilon, delta exp(-H(p)))``; the deepest node, then the likeliest
      path, then the lower number. Lossy (Medusa).

    Args:
        token_ids: int32 or int64 ``[batch, nodes]``; node 0 is the last committed token, its id is not looked at. A
            node of id -1 is not there, nor is what hangs on it.
        parents: int32 or int64 ``[batch, nodes]``, see `tree_layout`; at most 1024 nodes.
        target_logits: float32, bfloat16 or float16 ``[batch, nodes, vocab]``: row n is the distribution of node n's
            children.
        draft_logits: ``[batch, nodes, draft_vocab]``: the distribution they were drawn from; rows of leaves are not
            read. `SparseRows` of ``[batch, nodes, k]`` where only candidates were kept; None: deterministic candidates.
        max_depth: longest path of the batch, a host int. A deeper tree is malformed.
        sampling: the target's sampling parameters.
        draft_sampling: exactly those the drafts were drawn with; required with `draft_logits`. Temperature 0: every
            child is a point mass. With `SparseRows` a temperature alone.
        rng: names the random numbers; the position is that of the root's children. ``traversal`` requires ``step``.
        rule: see above. `MixedRules` has one for each request.
        replacement: rule ``recursive``: siblings are independent draws, and may be equal. Elsewhere equal siblings make
            a tree malformed.
        token_map: int32 ``[draft_vocab]``: target id of each draft column, injective.
        allowed: int32 ``[batch * nodes, ceil(vocab / 32)]`` packed bits, one row per target row.
        edits: `Edits` of the requests, or what `edit_rows` made of the target rows, with `parents`.
        draft_edits: the edits that the candidates were drawn with, mostly the same ones; not with `token_map`.
        typical_epsilon: of rule ``typical``: a number, or float32 ``[batch]``.
        typical_delta: of rule ``typical``, likewise.
        logprobs: ``"processed"`` or ``"raw"``.
        top: see `verify_chain`.
        group: see `verify_chain`.
        vocab_offsets: see `verify_chain`.
        max_children: with `group` and rule ``recursive``: most children of a node, a host int; each but the first costs
            an exchange. A wider tree is malformed. By default all nodes but the root.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        TreeResult. Bad rows, ids and trees never raise and never harm another request: see its `status`.

    Raises:
        ValueError: wrong shapes, dtypes, devices or combinations, before anything is launched.

    Example:
        >>> import torch
        >>> from specdec_kernels import RngKey, Sampling, verify_tree
        >>> ids, parents = torch.tensor([[0, 1, 2, 0]]), torch.tensor([[-1, 0, 0, 2]])
        >>> logits = torch.eye(3)[[2, 0, 0, 1]][None]
        >>> rng = RngKey(seed=torch.tensor([1]), position=torch.tensor([0]))
        >>> result = verify_tree(ids, parents, logits, max_depth=2, sampling=Sampling(), rng=rng, rule="greedy")
        >>> result.token_ids, result.path
        (tensor([[2, 0, 1]]), tensor([[ 2,  3, -1]], dtype=torch.int32))
    """
    name = "verify_tree"
    check = Checker.of(name, "parents", parents, "of int32 or int64")
    mode = check.choice("logprobs", logprobs, LOGPROBS)
    batch, nodes = check.parents(parents)
    rules = rule_names(check, rule, TREE_RULES, batch)
    check.dense("token_ids", token_ids, ID_DTYPES, (batch, nodes))
    check.size("max_depth", max_depth, 0, SIZE_BITS)
    vocab = draft_vocab = check.logits("target_logits", target_logits, (batch, nodes, "vocab"))
    kept = NO_KEPT
    if isinstance(draft_logits, SparseRows):
        refused = {"token_map": token_map, "draft_edits": draft_edits}
        draft_logits, kept = check.sparse(draft_logits, (batch, nodes), draft_sampling, refused)
    elif draft_logits is not None:
        draft_vocab = check.logits("draft_logits", draft_logits, (batch, nodes, "draft_vocab"))
    if draft_logits is not None and draft_sampling is None:
        fail(name, "draft_sampling", "given with draft_logits: the distribution the drafts were drawn from", None)
    sampling = check.sampling("sampling", sampling, batch)
    drafted = check.draft_sampling(draft_sampling, batch)
    rng = check.rng(rng, batch)
    if "traversal" in rules and rng.step is None:
        fail(name, "rng.step", "given for rule 'traversal': position alone biases it", None)
    if "traversal" in rules and nodes > MAX_TRAVERSAL_NODES:
        fail(name, "parents", f"of at most {MAX_TRAVERSAL_NODES} nodes for rule 'traversal'", list(parents.shape))
    if replacement not in (False, True):
        fail(name, "replacement", "True or False", repr(replacement))
    if replacement and "recursive" not in rules:
        fail(name, "replacement", "False unless the rule is 'recursive'", replacement)
    token_map = check.token_map(token_map, draft_vocab, vocab)
    shards = _shards.shards_of(name, group, vocab_offsets, vocab, backend)
    allowed = check.allowed(allowed, batch * nodes, vocab if shards is None else shards.size)
    both = NO_EDITS_GIVEN
    if edits is not None or draft_edits is not None:
        both = edits_given(
            op, edited, check.edits("edits", edits, batch * nodes, vocab, batch),
            check.draft_edits(draft_edits, draft_logits, batch * nodes, token_map, batch),
            Layout(token_ids, parents, None, nodes - 1), vocab, active=sampling.active, shards=shards, backend=backend,
        )  # fmt: skip
    if max_children is not None:
        check.size("max_children", max_children, 1)
        if shards is None or "recursive" not in rules:
            fail(name, "max_children", "None but for rule 'recursive' with a group", max_children)
    typical = check.typical(typical_epsilon, typical_delta, batch)
    which, first = (op, ()) if top is None else (listed, (check_top(check, top, mode),))
    if extras := both.extras(top):
        which, first = edited, extras
    given = outputs(name, out, TreeResult, "logprobs", torch.float32, is_wanted=bool(mode))
    told = len(op.results if top is None else listed.results)
    if given is not None:
        given = (*given[:told], *(nothing_listed(token_ids) if which is edited and top is None else ()))

    into = None if isinstance(rule, MixedRules) else given
    run = partial(run_listed, op, listed) if which is listed else which
    done: list[Tensors] = []
    for one, its in calls_of(rule, sampling):
        its, *limits = with_knobs(its, *typical.of_requests(one))
        args = (
            *first, token_ids, parents, target_logits, draft_logits, max_depth, *its, *drafted, *rng, TREE_RULES[one],
            replacement and one == "recursive", token_map, *kept, allowed, *both.rows, *both.draft_rows,
            *typical[:2], *limits, mode,
        )  # fmt: skip
        done.append(
            run(*args, device=parents.device, backend=backend, out=into, vocabulary=shards, max_children=max_children)
        )
    results = merged(which, rule, sampling, args, done, given) if isinstance(rule, MixedRules) else done[0]
    emitted, path, num_accepted, status, logprob, *listing = results[:told]
    return TreeResult(emitted, path, num_accepted, status, logprob if mode else None, *listing)
