"""What the rules of a tree look at, agreed on by all ranks: laws, each candidate under p and q, coins, races, masses.

A node's row is the law of its children. `rows` below are [batch, nodes] or a choice of them, flattened for the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _random, _rows, _trees
from .._rows import Law, Parameters
from .._trees import Tree
from . import laws, races
from .group import Shards, added
from .laws import Rows
from .sample import mask_allowed, pad

TARGET_PURPOSE, RESIDUAL_PURPOSE = 0, 2


class Drafted(NamedTuple):
    """The draft's rows and how they were sampled."""

    logits: Tensor  # this rank's part, [batch, nodes, columns]; the last nodes may have none
    parameter: Parameters
    filters: tuple[bool, bool, bool]
    stats: tuple[Tensor, Tensor] | None  # (logsumexp, threshold), [batch, nodes]


class Draw(NamedTuple):
    """One token after each of some rows."""

    token: Tensor  # int64
    logit: Tensor  # float32, its own, of the target
    empty: Tensor  # bool: nothing was left, the token is from p


def at(values: Tensor, index: Tensor) -> Tensor:
    """One entry a request."""
    return values.gather(1, index[:, None]).squeeze(1)


class Nodes:
    """Arguments of one call and the numbers of its first exchange."""

    def __init__(
        self, shards: Shards, tree: Tree, ids: Tensor, target_logits: Tensor, target: Parameters,
        filters: tuple[bool, bool, bool], drafted: Drafted | None, noise: tuple[Tensor, Tensor, Tensor | None],
        token_map: Tensor | None, allowed: Tensor | None, scored: Parameters | None, raw: bool,
    ) -> None:  # fmt: skip
        """`scored`: parameters of the law whose log-probabilities are wanted, if it is another than the target's."""
        self.shards, self.tree, self.ids = shards, tree, ids
        self.target, self.drafted = target, drafted
        self.seed, self.position, self.step = noise
        self.batch, self.nodes = ids.shape
        self.request = torch.arange(self.batch, device=ids.device)
        self.outside = tree.present & ((ids < -1) | (ids >= shards.size))
        self.usable = tree.present & (ids >= 0) & (ids < shards.size) & (tree.node > 0)
        self.x = ids.clamp(0, shards.size - 1)
        self.above = tree.parents.clamp(min=0)
        no_row = torch.zeros(self.batch, dtype=torch.bool, device=ids.device)
        self.has_draft_row = no_row if drafted is None else ~(target.greedy | drafted.parameter.greedy)

        request = self.request[:, None].expand_as(ids).flatten()
        given = pad(target_logits.flatten(0, 1), shards.widest)
        masked = mask_allowed(shards, given, allowed)
        tables = [Rows(masked, laws.expand(target, request), *filters)]
        items = [self._item(masked)]
        if drafted is not None:
            rows, misplaced = self._draft_rows(drafted.logits, token_map)
            of = self.request[:, None].expand(-1, drafted.logits.shape[1]).flatten()
            if drafted.stats is None:
                tables.append(Rows(rows, laws.expand(drafted.parameter, of), *drafted.filters))
            items.append(self._item(torch.where(misplaced, float("nan"), rows)))
            self.draft_rows = rows
        if scored is not None:
            rows = given if raw else masked
            tables.append(Rows(rows, laws.expand(scored, request), False, False, False))
            items.append(self._item(rows))
        finish = laws.begin(shards, tables, *items)

        # While the message travels: what needs no logits.
        self.rank = _trees.ranks(tree)
        depth = tree.depth.clamp(min=0)
        self.coin = self._coins(depth - 1, self.rank)
        self.children_coin = self._coins(depth, self.rank)

        found, logits = finish()
        self.law = found.pop(0)
        self.bad = self.law.bad.view(self.batch, -1)
        self.argmax = self.law.argmax.view(self.batch, -1)
        self.p = self._probability(self.law, logits[0].amax(0), self.above)
        self._read_draft(found, logits)
        self.scored = found.pop(0) if scored is not None else self.law
        self.x_logit = (logits[-1] if scored is not None else logits[0]).amax(0)
        self.scored_rows = tables[-1].logits if scored is not None else masked

    def _coins(self, offset: Tensor, index: Tensor) -> Tensor:
        """Coins [batch, nodes]."""
        noise = [self.seed, self.position, torch.zeros_like(self.seed) if self.step is None else self.step]
        seed, position, step = (n[:, None].expand_as(index).flatten() for n in noise)
        return _random.coin(seed, position + offset.flatten(), step, index.flatten()).view(index.shape)

    def _draft_rows(self, logits: Tensor, token_map: Tensor | None) -> tuple[Tensor, Tensor]:
        """(draft rows [rows, columns] by target id, whether the map names an id of another rank).

        Columns without a target id count in q but lie behind the ids.
        """
        widest, width = self.shards.widest, logits.shape[2]
        rows = pad(logits.flatten(0, 1), widest)
        if token_map is None:
            return rows, torch.zeros((), dtype=torch.bool, device=rows.device)
        ids = token_map.long()
        mine = (ids >= self.shards.first) & (ids < self.shards.end)
        misplaced = ((ids >= 0) & (ids < self.shards.size) & ~mine).any()
        place = torch.where(mine, ids - self.shards.first, widest + torch.arange(width, device=ids.device))
        out = rows.new_full((len(rows), 2 * widest), -torch.inf)
        out[:, place] = rows[:, :width]
        return torch.where(misplaced, float("nan"), out), misplaced

    def _item(self, rows: Tensor) -> Tensor:
        """Logit of each candidate in its parent's row, [batch, nodes]; -inf where another rank has it."""
        column = self.x - self.shards.first
        mine = (self.x >= self.shards.first) & (self.x < self.shards.end)
        rows = rows.view(self.batch, -1, rows.shape[-1])
        if rows.shape[1] == 0:
            return torch.full(self.x.shape, -torch.inf, device=rows.device)
        row = self.above.clamp(max=rows.shape[1] - 1)
        value = rows[self.request[:, None], row, column.clamp(0, self.shards.widest - 1)]
        return torch.where(mine, value, -torch.inf)

    def _probability(self, law: Law, logit: Tensor, row: Tensor) -> Tensor:
        """Probability of each candidate, float64 [batch, nodes]."""

        def of(values: Tensor) -> Tensor:
            return values.view(self.batch, -1).gather(1, row)

        weight = ((logit.double() - of(law.maximum).double()) * of(law.inv_t).double()).exp() / of(law.mass)
        kept = (logit > -torch.inf) & (logit >= of(law.threshold)) & ~of(law.bad)
        kept = kept & (~of(law.greedy) | (of(law.argmax) == self.x))
        return torch.where(kept, weight, 0.0)

    def _read_draft(self, found: list[Law], logits: list[Tensor]) -> None:
        """Candidates under q, and which rows of q cannot be read."""
        self.q = torch.ones_like(self.p)
        self.bad_draft = torch.zeros_like(self.bad)
        self.draft_law: Law | None = None
        if self.drafted is None or self.drafted.logits.shape[1] == 0:
            found[:1] = [] if self.drafted is not None and self.drafted.stats is None else found[:1]
            return
        parameter, logit = self.drafted.parameter, logits[1].amax(0)
        width = self.drafted.logits.shape[1]
        row = self.above.clamp(max=width - 1)
        if self.drafted.stats is None:
            self.draft_law = found.pop(0)
            q = self._probability(self.draft_law, logit, row)
            bad = self.draft_law.bad.view(self.batch, -1)
        else:
            logsumexp, threshold = (part.gather(1, row) for part in self.drafted.stats)
            scaled = logit.double() * parameter.inv_t.double()[:, None] - logsumexp.double()
            q = torch.where(logit >= threshold, scaled, -torch.inf).exp()
            unreadable = ~logsumexp.isfinite() | logit.isnan()
            bad = torch.zeros_like(self.bad).scatter(1, row, unreadable & (self.tree.parents >= 0))
        self.q = torch.where(self.has_draft_row[:, None], q, 1.0)
        bad = torch.nn.functional.pad(bad, (0, max(self.nodes - bad.shape[1], 0)))
        self.bad_draft = bad & self.has_draft_row[:, None]

    def probs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(p, q) of chosen rows [batch, chosen] at this rank's ids, float64 [batch * chosen, widest]; q is 0 where
        the draft is a point mass."""
        flat = (self.request[:, None] * self.nodes + rows).flatten()
        p = take(self.law, flat).probs()
        if self.drafted is None or self.drafted.logits.shape[1] == 0:
            return p, torch.zeros_like(p)
        width = self.drafted.logits.shape[1]
        row = rows.clamp(max=width - 1)
        flat = (self.request[:, None] * width + row).flatten()
        if self.draft_law is not None:
            q = take(self.draft_law, flat).probs()
        else:
            assert self.drafted.stats is not None
            logsumexp, threshold = (part.gather(1, row).flatten()[:, None] for part in self.drafted.stats)
            logits = self.draft_rows[flat]
            inv_t = self.drafted.parameter.inv_t[:, None].expand_as(rows).flatten()
            scaled = logits.double() * inv_t.double()[:, None] - logsumexp.double()
            q = torch.where(logits >= threshold, scaled, -torch.inf).exp()
        has = self.has_draft_row[:, None].expand_as(rows).flatten()
        return p, torch.where(has[:, None], q[:, : self.shards.widest], 0.0)

    def marked(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Ids of the nodes marked [batch, nodes] as columns of their parents' rows, bool [batch * chosen, widest]."""
        mine = (self.x >= self.shards.first) & (self.x < self.shards.end) & self.usable & nodes
        width = self.shards.widest + 1
        column = torch.where(mine, self.x - self.shards.first, self.shards.widest)
        where = self.above[:, None, :] == rows[:, :, None]  # [batch, chosen, nodes]
        column = torch.where(where, column[:, None, :], self.shards.widest)
        out = torch.zeros(*rows.shape, width, dtype=torch.bool, device=rows.device)
        return out.scatter(2, column, True).flatten(0, 1)[:, :-1]

    def words(self, rows: Tensor, purpose: int) -> Tensor:
        """Words [batch * chosen, widest] of the tokens after chosen rows."""
        position = (self.position[:, None] + self.tree.depth.clamp(min=0).gather(1, rows)).flatten()
        seed = self.seed[:, None].expand_as(rows).flatten()
        step = None if purpose == TARGET_PURPOSE or self.step is None else self.step[:, None].expand_as(rows).flatten()
        return races.words(self.shards, seed, position, step, purpose)

    def all_rows(self) -> Tensor:
        """Every row, [batch, nodes]."""
        return self.tree.node.expand(self.batch, -1)


def take(law: Law, rows: Tensor) -> Law:
    """Some rows of a table."""
    return Law(*(part[rows] for part in law))


__all__ = ["Draw", "Drafted", "Nodes", "added", "at", "take"]
