"""Inputs of every rule of verify_tree: candidates, row distributions on demand, coins, the draw that ends a walk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import _random, _rows, _trees
from ..._codes import NO_LOGPROBS, PROCESSED_LOGPROBS
from ..._rows import Distribution, Parameters
from ..._trees import Tree
from ..._types import RngKey, Sampling, TreeArguments


class Correction(NamedTuple):
    """The residual after rejections at a node: (p - scale q)+ without `hidden`, or p without `tried`."""

    rejected: Tensor  # bool [batch]: whether a candidate was rejected; else the draw is from p
    scale: Tensor  # float64 [batch]
    hidden: Tensor  # bool [batch, vocab]: ids that the draft distribution leaves out
    tried: Tensor  # bool [batch, vocab]: rejected ids, where the draft is a point mass


class Call:
    """Arguments of one call, prepared."""

    def __init__(self, given: TreeArguments, tree: Tree, target: Parameters, draft: Parameters) -> None:
        """Keep the arguments; `tree` is checked."""
        self.given, self.target, self.draft = given, target, draft
        self.tree, self.rank = tree, _trees.ranks(tree)
        self.ids = ids = given.token_ids.long()
        self.batch, self.nodes = ids.shape
        self.vocab = given.target_logits.shape[-1]
        self.slot = torch.arange(self.batch, device=ids.device)
        self.outside = tree.present & ((ids < -1) | (ids >= self.vocab))
        self.usable = tree.present & (ids >= 0) & (ids < self.vocab) & (tree.node > 0)
        # A greedy target never looks at the draft row: acceptance is equality with the argmax whatever q is.
        self.has_draft_row = ~(target.greedy | draft.greedy) & (given.draft_logits is not None)

    def children(self, node: Tensor) -> Tensor:
        """Children of one node a request, bool [batch, nodes]."""
        return self.tree.parents == node[:, None]

    def candidate(self, node: Tensor) -> Tensor:
        """Id of one node a request, some id of the vocabulary where it has none that can be used."""
        return at(self.ids, node).clamp(0, self.vocab - 1)

    def marked(self, nodes: Tensor) -> Tensor:
        """Ids of the usable nodes among `nodes` (bool [batch, nodes]) as bool [batch, vocab]."""
        column = torch.where(nodes & self.usable, self.ids, self.vocab)
        out = torch.zeros(self.batch, self.vocab + 1, dtype=torch.bool, device=self.ids.device)
        return out.scatter(1, column, True)[:, : self.vocab]

    def target_distribution(self, node: Tensor, parameter: Parameters | None = None) -> Distribution:
        """Distribution of the children of one node a request."""
        allowed = self.given.allowed
        if allowed is not None:
            allowed = allowed[self.slot * self.nodes + node]
        return _rows.distribution(self.given.target_logits[self.slot, node], parameter or self.target, allowed)

    def draft_probs(self, node: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(q over target ids float64 [batch, vocab], bad rows); a point mass at x where there is no draft row."""
        point = torch.nn.functional.one_hot(x, self.vocab).double()
        if self.given.draft_logits is None:
            return point, torch.zeros_like(self.has_draft_row)
        distribution = _rows.distribution(self.given.draft_logits[self.slot, node], self.draft)
        q = _rows.to_target_ids(distribution.probs(), self.given.token_map, self.vocab)
        return torch.where(self.has_draft_row[:, None], q, point), distribution.bad & self.has_draft_row

    def coin(self, node: Tensor) -> Tensor:
        """Coin of a candidate."""
        return _random.coin(self._key(at(self.tree.depth, node) - 1), at(self.rank, node))

    def children_coin(self, node: Tensor) -> Tensor:
        """The one coin of all children of a node."""
        return _random.coin(self._key(at(self.tree.depth, node)), at(self.rank, node))

    def noise(self, node: Tensor, purpose: int) -> Tensor:
        """Noise [batch, vocab] of the token after a node."""
        return _random.vocab_noise(self._key(at(self.tree.depth, node)), purpose, None, self.vocab)

    def _key(self, depth: Tensor) -> RngKey:
        return self.given.rng._replace(position=self.given.rng.position + depth)

    def nothing_rejected(self) -> Correction:
        """The correction where nothing was tried yet."""
        no_ids = torch.zeros(self.batch, self.vocab, dtype=torch.bool, device=self.ids.device)
        zero = torch.zeros(self.batch, dtype=torch.float64, device=self.ids.device)
        return Correction(zero.bool(), zero, no_ids, no_ids)

    def draw(self, node: Tensor, left: Correction, purpose: int, *, excludes: bool = False) -> tuple[Tensor, Tensor]:
        """(the token after a node, whether its residual was empty and it was drawn from p)."""
        row = self.target_distribution(node)
        noise = self.noise(node, purpose)
        plain = _rows.plain_draw(row, noise)
        without, nothing = _rows.draw_without(row, noise, left.tried)
        q, _ = self.draft_probs(node, torch.zeros_like(node))
        q = torch.where(left.hidden, 0.0, q)
        weight = row.probs().float() - (left.scale[:, None] * q).float()
        drawn, empty = _rows.residual_draw(torch.where(row.kept, weight, 0.0), noise)
        point = torch.ones_like(empty) if excludes else ~self.has_draft_row
        drawn = torch.where(point, without, drawn)
        empty = left.rejected & torch.where(point, nothing, empty)
        return torch.where(left.rejected & ~empty, drawn, plain), empty


def at(values: Tensor, index: Tensor) -> Tensor:
    """One entry a request."""
    return values.gather(1, index[:, None]).squeeze(1)


def first(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest marked node or 0, whether there is one) of each request."""
    return mask.int().argmax(1), mask.any(1)


def flag(status: Tensor, where: Tensor, bit: int) -> Tensor:
    """Status with a bit set."""
    return status | torch.where(where, bit, 0)


def has_candidates(tree: Tree, ids: Tensor, vocab: int) -> Tensor:
    """Whether the root has a child to examine, bool [batch]."""
    return ((tree.parents == 0) & (ids >= 0) & (ids < vocab)).any(1)


def has_twins(tree: Tree, ids: Tensor, vocab: int) -> Tensor:
    """Whether two siblings carry the same id, bool [batch]."""
    real = (tree.parents >= 0) & (ids >= 0) & (ids < vocab)
    same = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (ids[:, :, None] == ids[:, None, :])
    later = tree.node > tree.node[:, None]
    return (same & later & real[:, :, None] & real[:, None, :]).flatten(1).any(1)


def logprobs(call: Call, path: Tensor, token_ids: Tensor, processed: Parameters, mode: int) -> Tensor:
    """Log-probability of every emitted id under the row of the node before it; 0 where nothing was emitted."""
    if mode == NO_LOGPROBS:
        return torch.empty(0, device=token_ids.device)
    out = torch.zeros(token_ids.shape, device=token_ids.device)
    raw = _rows.parameters(call.batch, token_ids.device, Sampling())
    for i in range(token_ids.shape[1]):
        node, ids = path[:, i].clamp(min=0), token_ids[:, i]
        distribution = (
            call.target_distribution(node, processed)
            if mode == PROCESSED_LOGPROBS
            else _rows.distribution(call.given.target_logits[call.slot, node], raw)
        )
        out[:, i] = torch.where(ids >= 0, distribution.logprob(ids.clamp(min=0)), 0.0)
    return out
