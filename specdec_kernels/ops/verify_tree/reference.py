"""verify_tree, spelled plainly: walk from the root to an accepted node, then draw one token. The definition of the op.

Each rule gives the node where its walk stands in the end and what its rejections there leave to draw from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _rows, _trees
from ..._codes import RESIDUAL_PURPOSE, TARGET_PURPOSE, TREE_RULES, Status
from ..._types import Sampling, TreeArguments
from . import rules
from .call import Call, at, flag, has_candidates, has_twins, logprobs
from .traversal import traverse

MATCH, GREEDY, TYPICAL, RECURSIVE, GREEDY_MULTI_DRAFT, TARGET_ONLY, TRAVERSAL = TREE_RULES.values()


def verify_tree(given: TreeArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.verify_tree`."""
    batch, device = given.token_ids.shape[0], given.token_ids.device
    vocab, ids = given.target_logits.shape[-1], given.token_ids.long()
    rule, max_depth = given.rule, given.max_depth
    tree = _trees.tree(given.parents, max_depth)
    if not given.replacement:
        tree = _trees.root_only(tree, has_twins(tree, ids, vocab))
    status = torch.where(tree.bad, Status.BAD_LAYOUT, 0)
    target = _rows.parameters(batch, device, given.sampling)
    draft = _rows.parameters(batch, device, given.draft_sampling)
    processed = target
    if rule == GREEDY:  # argmax decoding reads no sampling parameter
        processed = _rows.parameters(batch, device, Sampling())
        target = processed._replace(greedy=torch.ones_like(processed.greedy))
    else:
        bad = target.bad
        if given.draft_logits is not None and rule in (RECURSIVE, GREEDY_MULTI_DRAFT, TRAVERSAL):
            bad = bad | (draft.bad & ~target.greedy & has_candidates(tree, ids, vocab))
        status = flag(status, bad, Status.BAD_SAMPLING)
    call = Call(given, tree, target, draft)

    purpose = TARGET_PURPOSE if rule == MATCH else RESIDUAL_PURPOSE
    if rule == TRAVERSAL:
        stand, token, status = traverse(call, max_depth, status)
    else:
        if rule == TYPICAL:
            stand, left, status = rules.typical(call, status)
        elif rule == RECURSIVE:
            stand, left, status = rules.recursive(call, status)
        elif rule == GREEDY_MULTI_DRAFT:
            stand, left, status = rules.greedy_multi_draft(call, max_depth, status)
        elif rule == TARGET_ONLY:
            stand, left, status = rules.target_only(call, max_depth, status)
        else:
            stand, left, status = rules.match(call, max_depth, purpose, status)
        token, empty = call.draw(stand, left, purpose, excludes=rule == TARGET_ONLY)
        status = flag(status, empty, Status.EMPTY_RESIDUAL)
    lost = call.target_distribution(stand).bad
    status = flag(status, lost, Status.BAD_TARGET)

    path = _trees.paths(tree, stand[:, None], max_depth)[:, 0]
    accepted = at(tree.depth, stand)
    column = torch.arange(max_depth + 1, device=device)
    following = torch.nn.functional.pad(path[:, 1:], (0, 1), value=-1)
    tokens = torch.where(following >= 0, ids.gather(1, following.clamp(min=0)), -1)
    tokens = torch.where((column == accepted[:, None]) & ~lost[:, None], token[:, None], tokens)
    logprob = logprobs(call, path, tokens, processed, given.logprobs_mode)
    return tokens.to(given.token_ids.dtype), following.int(), accepted.int(), status.int(), logprob
