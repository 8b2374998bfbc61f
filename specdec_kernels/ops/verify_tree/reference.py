"""verify_tree, spelled plainly: walk from the root to an accepted node, then draw one token. The definition of the op.

Each rule gives the node where its walk stands in the end and the token after it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ... import _rows, _trees, _walks
from ..._codes import TREE_RULES, Status
from ..._edited import NO_TOP, Layout, nothing_listed, with_rows
from ..._edits import Edits
from ..._nodes import Drafted, Nodes, at
from ..._scores import list_tokens, score
from ..._types import TreeArguments
from ..._vocabulary import Vocabulary
from ..._walks import DRAFT_RULES, flag
from . import rules
from .traversal import traverse


def verify_tree(
    given: TreeArguments, *, vocabulary: Vocabulary | None = None, max_children: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.verify_tree`.

    Where this rank holds a part of `vocabulary` 2 exchanges, 4 with filters, and those of `rules`. `max_children`: of
    any node under rule `recursive`; a tree with more of them is malformed.
    """
    vocabulary = vocabulary or Vocabulary(given.target_logits.shape[-1])
    rule, max_depth, mode = tuple(TREE_RULES)[given.rule], given.max_depth, given.logprobs_mode
    ids = given.token_ids.long()
    tree = _trees.tree(given.parents, max_depth)
    real = (tree.parents >= 0) & (ids >= 0) & (ids < vocabulary.size)
    same_parent = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (tree.parents >= 0)[:, :, None]
    earlier = same_parent & (tree.node < tree.node[:, None])
    rounds = ids.shape[1] - 1 if max_children is None else max_children
    malformed = (earlier.sum(2) >= max(rounds, 1)).any(1)
    if not given.replacement:
        twins = earlier & (ids[:, :, None] == ids[:, None, :]) & real[:, :, None] & real[:, None, :]
        malformed = malformed | twins.flatten(1).any(1)
    tree = _trees.root_only(tree, malformed)
    status = torch.where(tree.bad, Status.BAD_LAYOUT, 0)
    has_drafts = None if given.draft_logits is None else ((tree.parents == 0) & real).any(1)
    target, draft, processed, status = _walks.prepare(given, rule, has_drafts, status)
    drafted = None
    if given.draft_logits is not None and rule in DRAFT_RULES:
        drafted = Drafted(given.draft_logits, draft, None, given.draft_edits, given.draft_kept)
    nodes = Nodes(
        vocabulary, given, tree, ids, given.target_logits, target, drafted, given.allowed, given.edits,
        _walks.scored_by(rule, processed, mode),
    )  # fmt: skip
    if rule == "traversal":
        end = traverse(nodes, max_depth, status)
    elif rule == "recursive":
        end = rules.recursive(nodes, given.replacement, rounds, max_depth, status)
    elif rule == "typical":
        end = _walks.typical(nodes, given.typical, status)
    elif rule == "target_only":
        end = rules.target_only(nodes, max_depth, status)
    elif rule == "greedy_multi_draft":
        end = rules.greedy_multi_draft(nodes, max_depth, status)
    elif rule == "match":
        end = _walks.match(nodes, max_depth, status)
    else:
        end = _walks.argmax(nodes, max_depth, status)
    lost = at(nodes.bad, end.last)
    status = flag(end.status, lost, Status.BAD_TARGET)
    tokens, path, accepted, logprobs = _walks.result(nodes, end, lost, max_depth, mode)
    tokens = tokens.to(given.token_ids.dtype)
    return (
        _rows.of_active(given.sampling, tokens, -1),
        _rows.of_active(given.sampling, path.int(), -1),
        _rows.of_active(given.sampling, accepted.int()),
        _rows.of_active(given.sampling, status.int()),
        _rows.of_active(given.sampling, logprobs),
    )


def verify_tree_listed(
    top: int, given: TreeArguments, *, vocabulary: Vocabulary | None = None, max_children: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same with `top`: the results of `verify_tree`, then ranks, top_ids and top_logprobs of its tokens."""
    decided = verify_tree(given, vocabulary=vocabulary, max_children=max_children)
    return *decided, *list_tokens(partial(score, vocabulary), given, top, decided)


def verify_tree_edited(
    top: int, wanted_edits: Edits, are_of_drafts: bool, given: TreeArguments
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same with `Edits` of requests in place of those of rows; listed where `top` is not negative."""
    layout = Layout(given.token_ids, given.parents, None, given.parents.shape[1] - 1)
    given = with_rows(given, wanted_edits, are_of_drafts, layout)
    if top != NO_TOP:
        return verify_tree_listed(top, given)
    return *verify_tree(given), *nothing_listed(given.token_ids)
