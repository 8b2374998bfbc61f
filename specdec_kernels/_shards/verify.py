"""`verify_chain` and `verify_tree` over a sharded vocabulary; the arguments of the references behind the shards."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _chains, _rows, _trees
from .._codes import NO_LOGPROBS, PROCESSED_LOGPROBS, RAW_LOGPROBS, Status
from .._rows import Distribution, Parameters
from . import multi_round, walks
from .group import Shards
from .nodes import Drafted, Nodes, at
from .sample import log_probability
from .walks import End, flag

ARGMAX_RULES = ("greedy", "topm", "distance")
DRAFT_RULES = ("ratio", "block", "recursive", "greedy_multi_draft", "traversal")


def _prepare(
    rule: str, batch: int, device: torch.device, target: tuple[Tensor | None, ...], draft: tuple[Tensor | None, ...],
    has_drafts: Tensor | None, status: Tensor,
) -> tuple[Parameters, Parameters, Parameters, Tensor]:  # fmt: skip
    """(target's parameters, the draft's, those of processed log-probabilities, status).

    `has_drafts` is bool [batch]: whether a request has a drafted id to examine; None where there are no draft rows.
    """
    sampled = _rows.parameters(batch, device, *target)
    drafted = _rows.parameters(batch, device, *draft)
    if rule in ARGMAX_RULES:  # argmax decoding reads no sampling parameter
        processed = _rows.parameters(batch, device, None, None, None, None)
        return processed._replace(greedy=torch.ones_like(processed.greedy)), drafted, processed, status
    bad = sampled.bad
    if has_drafts is not None and rule in DRAFT_RULES:
        bad = bad | (drafted.bad & ~sampled.greedy & has_drafts)
    return sampled, drafted, sampled, flag(status, bad, Status.BAD_SAMPLING)


def _scored(rule: str, processed: Parameters, mode: int) -> Parameters | None:
    """Parameters of the distribution of log-probabilities where it is another than the one that is verified."""
    plain = _rows.parameters(len(processed.greedy), processed.greedy.device, None, None, None, None)
    return plain if mode == RAW_LOGPROBS or (mode == PROCESSED_LOGPROBS and rule in ARGMAX_RULES) else None


def _filters(rule: str, values: tuple[Tensor | None, ...]) -> tuple[bool, bool, bool]:
    """Which of top-k, top-p, min-p may be on."""
    if rule in ARGMAX_RULES:
        return False, False, False
    _, top_k, top_p, min_p = values
    return top_k is not None, top_p is not None, min_p is not None


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


def verify_chain(
    shards: Shards,
    draft_ids: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_logsumexp: Tensor | None,
    draft_threshold: Tensor | None,
    cu_draft: Tensor | None,
    max_draft: int,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    draft_temperature: Tensor | None,
    draft_top_k: Tensor | None,
    draft_top_p: Tensor | None,
    draft_min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
    step: Tensor | None,
    rule: str,
    over_acceptance: float,
    rejected_from_target: bool,
    token_map: Tensor | None,
    allowed: Tensor | None,
    typical_epsilon: float,
    typical_delta: float,
    top_m: int,
    max_distance: int,
    min_block: int,
    logprobs_mode: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.verify_chain`."""
    chains = _chains.chains(draft_ids, target_logits, draft_logits, cu_draft, max_draft)
    batch, device = chains.ids.shape[0], draft_ids.device
    status = torch.where(chains.bad, Status.BAD_LAYOUT, 0)
    sampled, drafting = (temperature, top_k, top_p, min_p), (draft_temperature, draft_top_k, draft_top_p, draft_min_p)
    has_drafts = None if draft_logits is None else chains.has_drafts(shards.size)
    target, draft, processed, status = _prepare(rule, batch, device, sampled, drafting, has_drafts, status)
    row = torch.arange(max_draft + 1, device=device)
    drafted = None
    if rule in DRAFT_RULES and chains.has_draft_rows() and max_draft:
        rows, stats = chains.draft_rows(max_draft), None
        if draft_logsumexp is not None and draft_threshold is not None:
            stats = (chains.draft_rows(max_draft, draft_logsumexp), chains.draft_rows(max_draft, draft_threshold))
        drafted = Drafted(rows, draft, _filters(rule, drafting), stats)
    bits = None if allowed is None else chains.allowed_rows(allowed, max_draft + 1)
    ids = torch.nn.functional.pad(chains.ids, (1, 0), value=-1)
    tree = _trees.tree((row - 1).expand(batch, -1), max_draft)
    nodes = Nodes(
        shards, tree, ids, chains.target_rows(max_draft + 1), target, _filters(rule, sampled), drafted,
        (seed, position, step), token_map, bits, _scored(rule, processed, logprobs_mode), logprobs_mode,
    )  # fmt: skip
    silent = chains.lost
    if rule == "block":
        end, bonus_bad = multi_round.block(nodes, chains.lost, status)
        silent = silent | bonus_bad
    else:
        end = _walk_chain(nodes, rule, (over_acceptance, rejected_from_target), (typical_epsilon, typical_delta),
                          (top_m, max_distance, min_block), max_draft, status)  # fmt: skip
        bad = at(nodes.bad, end.stand)
        end = end._replace(status=flag(end.status, bad, Status.BAD_TARGET))
        silent = silent | bad
    # Of a request that is lost nothing but its layout was looked at.
    seen = Status.BAD_LAYOUT | Status.BAD_SAMPLING
    status = torch.where(chains.lost, end.status & seen, end.status)
    tokens, _, accepted, logprobs = _result(nodes, end, silent, max_draft, logprobs_mode)
    return tokens.to(draft_ids.dtype), accepted.int(), status.int(), logprobs


def _walk_chain(
    nodes: Nodes, rule: str, ratio: tuple[float, bool], typical: tuple[float, float], stern: tuple[int, int, int],
    max_draft: int, status: Tensor,
) -> End:  # fmt: skip
    if rule == "ratio":
        return walks.ratio(nodes, max_draft, *ratio, status)
    if rule == "typical":
        return walks.typical(nodes, *typical, status)
    if rule == "match":
        return walks.match(nodes, max_draft, status)
    near = None if rule == "greedy" else walks.stern(nodes, rule, *stern)
    return walks.argmax(nodes, max_draft, status, near)


def verify_tree(
    shards: Shards,
    max_children: int | None,
    token_ids: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    max_depth: int,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    draft_temperature: Tensor | None,
    draft_top_k: Tensor | None,
    draft_top_p: Tensor | None,
    draft_min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
    step: Tensor | None,
    rule: str,
    replacement: bool,
    token_map: Tensor | None,
    allowed: Tensor | None,
    typical_epsilon: float,
    typical_delta: float,
    logprobs_mode: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.verify_tree`."""
    batch, num_nodes = token_ids.shape
    ids, device = token_ids.long(), token_ids.device
    tree = _trees.tree(parents, max_depth)
    real = (tree.parents >= 0) & (ids >= 0) & (ids < shards.size)
    same_parent = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (tree.parents >= 0)[:, :, None]
    earlier = same_parent & (tree.node < tree.node[:, None])
    rounds = num_nodes - 1 if max_children is None else max_children
    malformed = (earlier.sum(2) >= max(rounds, 1)).any(1)
    if not replacement:
        twins = earlier & (ids[:, :, None] == ids[:, None, :]) & real[:, :, None] & real[:, None, :]
        malformed = malformed | twins.flatten(1).any(1)
    tree = _trees.root_only(tree, malformed)
    status = torch.where(tree.bad, Status.BAD_LAYOUT, 0)
    sampled, drafting = (temperature, top_k, top_p, min_p), (draft_temperature, draft_top_k, draft_top_p, draft_min_p)
    has_drafts = None if draft_logits is None else ((tree.parents == 0) & real).any(1)
    target, draft, processed, status = _prepare(rule, batch, device, sampled, drafting, has_drafts, status)
    drafted = None
    if draft_logits is not None and rule in DRAFT_RULES:
        drafted = Drafted(draft_logits, draft, _filters(rule, drafting), None)
    nodes = Nodes(
        shards, tree, ids, target_logits, target, _filters(rule, sampled), drafted, (seed, position, step), token_map,
        allowed, _scored(rule, processed, logprobs_mode), logprobs_mode,
    )  # fmt: skip
    if rule == "traversal":
        end = multi_round.traverse(nodes, max_depth, status)
    elif rule == "recursive":
        end = multi_round.recursive(nodes, replacement, rounds, max_depth, status)
    elif rule == "typical":
        end = walks.typical(nodes, typical_epsilon, typical_delta, status)
    elif rule == "target_only":
        end = walks.target_only(nodes, max_depth, status)
    elif rule == "greedy_multi_draft":
        end = walks.greedy_multi_draft(nodes, max_depth, status)
    elif rule == "match":
        end = walks.match(nodes, max_depth, status)
    else:
        end = walks.argmax(nodes, max_depth, status)
    lost = at(nodes.bad, end.stand)
    status = flag(end.status, lost, Status.BAD_TARGET)
    tokens, path, accepted, logprobs = _result(nodes, end, lost, max_depth, logprobs_mode)
    return tokens.to(token_ids.dtype), path.int(), accepted.int(), status.int(), logprobs
