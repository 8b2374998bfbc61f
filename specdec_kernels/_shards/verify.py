"""`verify_chain` and `verify_tree` over a sharded vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _chains, _rows, _trees
from .._codes import CHAIN_RULES, NO_LOGPROBS, PROCESSED_LOGPROBS, RAW_LOGPROBS, TREE_RULES, Status
from .._rows import Distribution, Parameters
from .._types import ChainArguments, Sampling, TreeArguments
from . import multi_round, rules
from .group import Shards
from .nodes import Drafted, Nodes, at
from .rules import End, flag
from .sample import filters, log_probability

ARGMAX_RULES = ("greedy", "topm", "distance")
DRAFT_RULES = ("ratio", "block", "recursive", "greedy_multi_draft", "traversal")


def _prepare(
    given: ChainArguments | TreeArguments, rule: str, has_drafts: Tensor | None, status: Tensor
) -> tuple[Parameters, Parameters, Parameters, Tensor]:
    """(target's parameters, the draft's, those of processed log-probabilities, status).

    `has_drafts` is bool [batch]: whether a request has a drafted id to examine; None where there are no draft rows.
    """
    batch, device = len(status), status.device
    sampled = _rows.parameters(batch, device, given.sampling)
    drafted = _rows.parameters(batch, device, given.draft_sampling)
    if rule in ARGMAX_RULES:  # argmax decoding reads no sampling parameter
        processed = _rows.parameters(batch, device, Sampling())
        return processed._replace(greedy=torch.ones_like(processed.greedy)), drafted, processed, status
    bad = sampled.bad
    if has_drafts is not None and rule in DRAFT_RULES:
        bad = bad | (drafted.bad & ~sampled.greedy & has_drafts)
    return sampled, drafted, sampled, flag(status, bad, Status.BAD_SAMPLING)


def _scored(rule: str, processed: Parameters, mode: int) -> Parameters | None:
    """Parameters of the distribution of log-probabilities where it is another than the one that is verified."""
    plain = _rows.parameters(len(processed.greedy), processed.greedy.device, Sampling())
    return plain if mode == RAW_LOGPROBS or (mode == PROCESSED_LOGPROBS and rule in ARGMAX_RULES) else None


def _filters(given: ChainArguments | TreeArguments, rule: str) -> tuple[bool, bool, bool]:
    return filters(Sampling() if rule in ARGMAX_RULES else given.sampling)


def _logprobs(nodes: Nodes, path: Tensor, tokens: Tensor, end: End, mode: int) -> Tensor:
    """Log-probability of each emitted id under the row of the node before it; 0 where nothing was emitted."""
    if mode == NO_LOGPROBS:
        return torch.empty(0, device=tokens.device)
    following = torch.nn.functional.pad(path[:, 1:], (0, 1), value=-1)
    logit = nodes.x_logit.gather(1, following.clamp(min=0))
    logit = torch.where(following >= 0, logit, end.logit[:, None])
    rows = (nodes.request[:, None] * nodes.nodes + path.clamp(min=0)).flatten()
    distribution = Distribution(*(part[rows] if part.dim() == 1 else part for part in nodes.scored))
    return torch.where(tokens >= 0, log_probability(distribution, logit.flatten()).view(tokens.shape), 0.0)


def _result(
    nodes: Nodes, end: End, silent: Tensor, max_depth: int, mode: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(token_ids, path behind the root, num_accepted, logprobs); nothing is drawn for `silent` requests."""
    path = _trees.paths(nodes.tree, end.stand[:, None], max_depth)[:, 0]
    accepted = at(nodes.tree.depth, end.stand)
    column = torch.arange(max_depth + 1, device=path.device)
    following = torch.nn.functional.pad(path[:, 1:], (0, 1), value=-1)
    tokens = torch.where(following >= 0, nodes.ids.gather(1, following.clamp(min=0)), -1)
    tokens = torch.where((column == accepted[:, None]) & ~silent[:, None], end.token[:, None], tokens)
    return tokens, following, accepted, _logprobs(nodes, path, tokens, end, mode)


def verify_chain(shards: Shards, given: ChainArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.verify_chain`."""
    rule, max_draft, mode = tuple(CHAIN_RULES)[given.rule], given.max_draft, given.logprobs_mode
    chains = _chains.chains(*given[:3], given.cu_draft, max_draft)
    status = torch.where(chains.bad, Status.BAD_LAYOUT, 0)
    has_drafts = None if given.draft_logits is None else chains.has_drafts(shards.size)
    target, draft, processed, status = _prepare(given, rule, has_drafts, status)
    row = torch.arange(max_draft + 1, device=status.device)
    drafted = None
    if rule in DRAFT_RULES and chains.has_draft_rows() and max_draft:
        rows, stats = chains.draft_rows(max_draft), None
        if given.draft_logsumexp is not None and given.draft_threshold is not None:
            stats = (
                chains.draft_rows(max_draft, given.draft_logsumexp),
                chains.draft_rows(max_draft, given.draft_threshold),
            )
        drafted = Drafted(rows, draft, filters(given.draft_sampling), stats)
    bits = None if given.allowed is None else chains.allowed_rows(given.allowed, max_draft + 1)
    ids = torch.nn.functional.pad(chains.ids, (1, 0), value=-1)
    tree = _trees.tree((row - 1).expand(len(status), -1), max_draft)
    nodes = Nodes(
        shards, given, tree, ids, chains.target_rows(max_draft + 1), target, _filters(given, rule), drafted, bits,
        _scored(rule, processed, mode),
    )  # fmt: skip
    silent = chains.lost
    if rule == "block":
        end, bonus_bad = multi_round.block(nodes, chains.lost, status)
        silent = silent | bonus_bad
    else:
        end = _walk_chain(nodes, given, rule, status)
        bad = at(nodes.bad, end.stand)
        end = end._replace(status=flag(end.status, bad, Status.BAD_TARGET))
        silent = silent | bad
    # Of a request that is lost nothing but its layout was looked at.
    seen = Status.BAD_LAYOUT | Status.BAD_SAMPLING
    status = torch.where(chains.lost, end.status & seen, end.status)
    tokens, _, accepted, logprobs = _result(nodes, end, silent, max_draft, mode)
    return tokens.to(given.draft_ids.dtype), accepted.int(), status.int(), logprobs


def _walk_chain(nodes: Nodes, given: ChainArguments, rule: str, status: Tensor) -> End:
    if rule == "ratio":
        return rules.ratio(nodes, given.max_draft, given.over_acceptance, given.rejected_from_target, status)
    if rule == "typical":
        return rules.typical(nodes, given.typical_epsilon, given.typical_delta, status)
    if rule == "match":
        return rules.match(nodes, given.max_draft, status)
    near = None
    if rule != "greedy":
        near = rules.stern(nodes, rule, given.top_m, given.max_distance, given.min_block)
    return rules.argmax(nodes, given.max_draft, status, near)


def verify_tree(
    shards: Shards, max_children: int | None, given: TreeArguments
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.verify_tree`."""
    rule, max_depth, mode = tuple(TREE_RULES)[given.rule], given.max_depth, given.logprobs_mode
    ids = given.token_ids.long()
    tree = _trees.tree(given.parents, max_depth)
    real = (tree.parents >= 0) & (ids >= 0) & (ids < shards.size)
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
    target, draft, processed, status = _prepare(given, rule, has_drafts, status)
    drafted = None
    if given.draft_logits is not None and rule in DRAFT_RULES:
        drafted = Drafted(given.draft_logits, draft, filters(given.draft_sampling), None)
    nodes = Nodes(
        shards, given, tree, ids, given.target_logits, target, _filters(given, rule), drafted, given.allowed,
        _scored(rule, processed, mode),
    )  # fmt: skip
    if rule == "traversal":
        end = multi_round.traverse(nodes, max_depth, status)
    elif rule == "recursive":
        end = multi_round.recursive(nodes, given.replacement, rounds, max_depth, status)
    elif rule == "typical":
        end = rules.typical(nodes, given.typical_epsilon, given.typical_delta, status)
    elif rule == "target_only":
        end = rules.target_only(nodes, max_depth, status)
    elif rule == "greedy_multi_draft":
        end = rules.greedy_multi_draft(nodes, max_depth, status)
    elif rule == "match":
        end = rules.match(nodes, max_depth, status)
    else:
        end = rules.argmax(nodes, max_depth, status)
    lost = at(nodes.bad, end.stand)
    status = flag(end.status, lost, Status.BAD_TARGET)
    tokens, path, accepted, logprobs = _result(nodes, end, lost, max_depth, mode)
    return tokens.to(given.token_ids.dtype), path.int(), accepted.int(), status.int(), logprobs
