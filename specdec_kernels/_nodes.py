"""Inputs of the rules of chains and trees: distributions, candidates under p and q, coins, races. A chain is a tree.

A node's row is the distribution of its children. `rows` are numbers of nodes, [batch, chosen]; what has a vocabulary is
flat.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _random, _rows, _sparse, _trees, _vocabulary
from ._codes import RAW_LOGPROBS
from ._edits import RowEdits
from ._rows import Distribution, Parameters
from ._trees import Tree
from ._types import ChainArguments, Kept, RngKey, TreeArguments
from ._vocabulary import Table, Vocabulary


class Drafted(NamedTuple):
    """The draft's rows and how they were sampled."""

    logits: Tensor  # this rank's part, [batch, nodes, columns]; the last nodes may have none
    parameter: Parameters
    stats: tuple[Tensor, Tensor] | None  # (logsumexp, threshold), [batch, nodes]
    edits: RowEdits
    kept: Kept = Kept()  # [batch, nodes, columns]: target id of each column, where they are candidates; [batch, nodes]


class Draw(NamedTuple):
    """One token after each of some rows."""

    token: Tensor  # int64
    logit: Tensor  # float32, its own, of the target
    empty: Tensor  # bool: nothing was left, the token is from p


def at(values: Tensor, index: Tensor) -> Tensor:
    """One entry a request."""
    return values.gather(1, index[:, None]).squeeze(1)


def _by_stats(logits: Tensor, inv_t: Tensor, logsumexp: Tensor, threshold: Tensor) -> Tensor:
    """Probabilities under `draft_stats`, float64; -inf has none, at temperature inf neither."""
    scaled = logits.double() * inv_t.double() - logsumexp.double()
    return torch.where((logits >= threshold) & (logits > -torch.inf), scaled, -torch.inf).exp()


class Nodes:
    """Arguments of one call and the numbers of its first exchange."""

    def __init__(
        self, vocabulary: Vocabulary, given: ChainArguments | TreeArguments, tree: Tree, ids: Tensor,
        target_logits: Tensor, target: Parameters, drafted: Drafted | None, allowed: Tensor | None,
        edits: RowEdits, scored: Parameters | None,
    ) -> None:  # fmt: skip
        """`scored`: parameters of the distribution for the log-probabilities, if it is not the target's."""
        if drafted is not None and drafted.logits.shape[1] == 0:
            drafted = None
        self.vocabulary, self.tree, self.ids = vocabulary, tree, ids
        self.target, self.drafted = target, drafted
        self.rng = given.rng
        self.batch, self.nodes = ids.shape
        self.request = torch.arange(self.batch, device=ids.device)
        self.outside = tree.present & ((ids < -1) | (ids >= vocabulary.size))
        self.usable = tree.present & (ids >= 0) & (ids < vocabulary.size) & (tree.node > 0)
        self.x = ids.clamp(0, vocabulary.size - 1)
        self.above = tree.parents.clamp(min=0)
        no_row = torch.zeros(self.batch, dtype=torch.bool, device=ids.device)
        self.has_draft_row = no_row if drafted is None else ~(target.greedy | drafted.parameter.greedy)

        request = self.request[:, None].expand_as(ids).flatten()
        padded = vocabulary.pad(target_logits.flatten(0, 1))
        masked = _rows.edited(padded, allowed, edits, vocabulary.first)
        tables = [Table(masked, target.of_rows(request))]
        items = [self._item(masked, self.nodes)]
        if drafted is not None:
            of = self.request[:, None].expand(-1, drafted.logits.shape[1]).flatten()
            rows = self._draft_rows(drafted, given.token_map, drafted.parameter.inv_t[of])
            if drafted.stats is None:
                tables.append(Table(rows, drafted.parameter.of_rows(of)))
            items.append(self._item(rows, drafted.logits.shape[1]))
            self.draft_rows = rows
        if scored is not None:
            rows = padded if given.logprobs_mode == RAW_LOGPROBS else masked
            tables.append(Table(rows, scored.of_rows(request)))
            items.append(self._item(rows, self.nodes))
        finish = vocabulary.distributions(tables, *items)

        # While the message travels: what needs no logits.
        self.rank = _trees.ranks(tree)
        depth = tree.depth.clamp(min=0)
        self.coin = self._coins(depth - 1, self.rank)
        self.children_coin = self._coins(depth, self.rank)

        found, logits = finish()
        self.distribution = found.pop(0)
        self.bad = self.distribution.bad.view(self.batch, self.nodes)
        self.argmax = self.distribution.argmax.view(self.batch, self.nodes)
        self.p_logit = logits[0].amax(0)
        self.p = self._probability(self.distribution, self.p_logit, self.above, self.nodes)
        self._read_draft(found, logits)
        self.scored = found.pop(0) if scored is not None else self.distribution
        self.x_logit = (logits[-1] if scored is not None else logits[0]).amax(0)
        self.is_raw_edited = given.logprobs_mode == RAW_LOGPROBS and edits.edit_bits is not None
        self.scored_rows = tables[0 if scored is None else -1].logits if given.logprobs_mode else None

    def _draft_rows(self, drafted: Drafted, token_map: Tensor | None, inv_t: Tensor) -> Tensor:
        """The draft's rows by target id, [batch * rows, widest]; NaN where candidates are no distribution."""
        logits = drafted.logits.flatten(0, 1)
        if drafted.kept.kept_ids is None or drafted.kept.kept_logsumexp is None:
            return drafted.edits.apply(self.vocabulary.by_id(logits, token_map))
        ids, logsumexp = drafted.kept.kept_ids.flatten(0, 1), drafted.kept.kept_logsumexp.flatten()
        bad = _sparse.is_bad(ids, logits, logsumexp, inv_t, self.vocabulary.size)
        return torch.where(bad[:, None], float("nan"), self.vocabulary.by_kept_id(logits, ids))

    def _coins(self, offset: Tensor, index: Tensor) -> Tensor:
        """Coins [batch, nodes]."""
        return _random.coin(self._keys(offset), index.flatten()).view(index.shape)

    def _keys(self, offset: Tensor) -> RngKey:
        """Keys [batch * chosen] of positions behind the first, offset [batch, chosen]."""
        seed, position = (part[:, None].expand_as(offset).flatten() for part in self.rng[:2])
        step = None if self.rng.step is None else self.rng.step[:, None].expand_as(offset).flatten()
        return RngKey(seed, position + offset.flatten(), step)

    def _item(self, rows: Tensor, count: int) -> Tensor:
        """Logit of each candidate in its parent's row of `count`, [batch, nodes]; -inf where another rank has it."""
        column = self.x - self.vocabulary.first
        mine = (self.x >= self.vocabulary.first) & (self.x < self.vocabulary.end)
        rows = rows.unflatten(0, (self.batch, count))
        row = self.above.clamp(max=count - 1)
        value = rows[self.request[:, None], row, column.clamp(0, self.vocabulary.widest - 1)]
        return torch.where(mine, value, -torch.inf)

    def _probability(self, distribution: Distribution, logit: Tensor, row: Tensor, count: int) -> Tensor:
        """Probability of each candidate, float64 [batch, nodes]."""

        def of(values: Tensor) -> Tensor:
            return values.view(self.batch, count).gather(1, row)

        exponent = (logit.double() - of(distribution.maximum).double()) * of(distribution.inv_t).double()
        weight = exponent.exp() / of(distribution.mass)
        kept = (logit > -torch.inf) & (logit >= of(distribution.threshold)) & ~of(distribution.bad)
        kept = kept & (~of(distribution.greedy) | (of(distribution.argmax) == self.x))
        return torch.where(kept, weight, 0.0)

    def _read_draft(self, found: list[Distribution], logits: list[Tensor]) -> None:
        """Candidates under q, and those whose row of q cannot be read."""
        self.q = torch.ones_like(self.p)
        self.bad_draft = torch.zeros_like(self.bad)
        self.draft_distribution: Distribution | None = None
        if self.drafted is None:
            return
        logit = logits[1].amax(0)
        width = self.drafted.logits.shape[1]
        row = self.above.clamp(max=width - 1)
        if self.drafted.stats is None:
            self.draft_distribution = found.pop(0)
            q = self._probability(self.draft_distribution, logit, row, width)
            bad = self.draft_distribution.bad.view(self.batch, width).gather(1, row)
        else:
            logsumexp, threshold = (part.gather(1, row) for part in self.drafted.stats)
            q = _by_stats(logit, self.drafted.parameter.inv_t[:, None], logsumexp, threshold)
            bad = ~logsumexp.isfinite() | logit.isnan()
        self.q = torch.where(self.has_draft_row[:, None], q, 1.0)
        self.bad_draft = bad & self.has_draft_row[:, None]

    def distributions(self, rows: Tensor) -> Distribution:
        """Target distributions of chosen rows [batch, chosen], flattened."""
        return self.distribution.take((self.request[:, None] * self.nodes + rows).flatten())

    def probs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(p, q) of chosen rows [batch, chosen] at this rank's ids, float64 [batch * chosen, widest].

        Where the draft is a point mass q is 0.
        """
        p = self.distributions(rows).probs()
        if self.drafted is None:
            return p, torch.zeros_like(p)
        width = self.drafted.logits.shape[1]
        row = rows.clamp(max=width - 1)
        flat = (self.request[:, None] * width + row).flatten()
        if self.draft_distribution is not None:
            q = self.draft_distribution.take(flat).probs()
        else:
            assert self.drafted.stats is not None
            logsumexp, threshold = (part.gather(1, row).flatten()[:, None] for part in self.drafted.stats)
            logits = self.draft_rows[flat]
            inv_t = self.drafted.parameter.inv_t[:, None].expand_as(rows).flatten()
            q = _by_stats(logits, inv_t[:, None], logsumexp, threshold)
        has = self.has_draft_row[:, None].expand_as(rows).flatten()
        return p, torch.where(has[:, None], q[:, : self.vocabulary.widest], 0.0)

    def argmax_logit(self, row: Tensor, token: Tensor) -> Tensor:
        """Logit [batch] of the argmax of a row each, as its log-probability asks for it."""
        maximum = at(self.distribution.maximum.view(self.batch, self.nodes), row)
        if not self.is_raw_edited or self.scored_rows is None:
            return maximum
        rows, column = self.scored_rows[self.request * self.nodes + row], token - self.vocabulary.first
        mine = (token >= self.vocabulary.first) & (token < self.vocabulary.end)
        own = at(rows, column.clamp(0, self.vocabulary.widest - 1))
        (parts,) = self.vocabulary.send(torch.where(mine, own, -torch.inf))()
        return parts.amax(0)

    def draft_maximum(self, rows: Tensor) -> Tensor:
        """This rank's largest logit of chosen draft rows, [batch, chosen]; NaN where one is."""
        assert self.drafted is not None
        width = self.drafted.logits.shape[1]
        return self.draft_rows[self.request[:, None] * width + rows.clamp(max=width - 1)].amax(2)

    def marked(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Ids of the nodes marked [batch, nodes] as columns of their parents' rows, bool [batch * chosen, widest]."""
        mine = (self.x >= self.vocabulary.first) & (self.x < self.vocabulary.end) & self.usable & nodes
        width = self.vocabulary.widest + 1
        column = torch.where(mine, self.x - self.vocabulary.first, self.vocabulary.widest)
        where = self.above[:, None, :] == rows[:, :, None]  # [batch, chosen, nodes]
        column = torch.where(where, column[:, None, :], self.vocabulary.widest)
        out = torch.zeros(*rows.shape, width, dtype=torch.bool, device=rows.device)
        return out.scatter(2, column, True).flatten(0, 1)[:, :-1]

    def noise(self, rows: Tensor, purpose: int) -> Tensor:
        """Noise [batch * chosen, widest] of the tokens after chosen rows."""
        return self.vocabulary.noise(self._keys(self.tree.depth.clamp(min=0).gather(1, rows)), purpose)

    @property
    def every(self) -> Tensor:
        """All rows, [batch, nodes]."""
        return self.tree.node.expand(self.batch, -1)

    def race(
        self, rows: Tensor, purpose: int, weight: Tensor | None = None, tried: Tensor | None = None,
        point: Tensor | None = None, more: tuple[Tensor, ...] = (),
    ) -> tuple[Draw, Draw, list[Tensor]]:  # fmt: skip
        """(draws from p, draws from what rejections left, `more` of every rank) of chosen rows, in one exchange.

        What is left: `weight` float32 [batch * chosen, widest], or where `point` [batch] p without the nodes `tried`.
        """
        distribution, noise = self.distributions(rows), self.noise(rows, purpose)
        ids = self.vocabulary.columns(noise.device)
        flat = (self.request[:, None] * self.nodes + rows).flatten()
        shown = self.scored_rows[flat] if self.scored_rows is not None else distribution.logits

        def best(score: Tensor) -> tuple[Tensor, ...]:
            message = _vocabulary.best(score, ids, shown)
            return message if self.scored_rows is not None else message[:2]

        fields = best(_rows.plain_scores(distribution, noise))
        if weight is not None:
            assert tried is not None and point is not None
            without = _rows.plain_scores(distribution, noise, self.marked(rows, tried))
            score = _rows.residual_scores(weight, noise)
            points = point[:, None].expand_as(rows).flatten()
            score = torch.where(points[:, None], without, score)
            fields += best(score)
        got = self.vocabulary.send(*fields, *more)()
        draws = []
        for _ in range(1 if weight is None else 2):
            logit = got[2] if self.scored_rows is not None else torch.zeros_like(got[0])
            won = _vocabulary.winner(got[0], got[1], logit)
            token, logit = won.ids.view(rows.shape), won.logit.view(rows.shape)
            draws.append(Draw(token.clamp(min=0), logit, token < 0))
            del got[: 3 if self.scored_rows is not None else 2]
        return draws[0], draws[-1], got
