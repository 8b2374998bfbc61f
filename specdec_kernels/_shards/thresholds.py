"""Sharded rows: the numbers of `_rows.Distribution`, agreed on by all ranks, around each rank's own logits.

Without filters one exchange: maximum, sum and argmax of each shard. Filters are thresholds on the raw logit and take
two more, whatever top_k and top_p are:

1. each rank sends every g-th of its sorted logits; every f-th of all of them is a grid that all ranks know,
2. each rank counts and sums its logits above every point of the grid: between two neighbours of the grid lie fewer
   than f g logits of a rank. That brackets the k-th largest logit, and with it the mass that top-p starts from,
3. each rank lists what it has inside the brackets, which gives both thresholds exactly.

The bracket of top-p is as wide as the mass inside the bracket of top-k, and its logits weigh no less than those: it
holds no more of them than the other, at most (f - 1 + ranks) g in all, and two cells of the grid at its edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _rows
from .._nodes import at
from .._rows import Distribution, Parameters, weights
from .._vocabulary import Table, Vocabulary, added

_INF = float("inf")


class Statistics(NamedTuple):
    """Numbers of some rows that all ranks share after the first exchange."""

    maximum: Tensor  # float32 [rows], 0 where bad
    argmax: Tensor  # int64 [rows], global id
    mass: Tensor  # float64 [rows], of all ids
    bad: Tensor  # bool [rows]


class Grid(NamedTuple):
    """Points in falling order, +inf first and -inf last, and what lies above each in the whole vocabulary."""

    point: Tensor  # float32 [rows, points]
    reached: Tensor  # int64, logits >= point
    above: Tensor  # int64, logits > point
    mass: Tensor  # float64, of logits >= point
    mass_above: Tensor  # float64


def spacing(vocabulary: Vocabulary, rows: Table) -> tuple[int, int]:
    """(g, f): g balances the grid, 16 bytes a point, with the lists, 4 bytes a logit."""
    thin = 4 if rows.parameter.has_k and rows.parameter.has_p else 1
    lists = 4 * thin + vocabulary.ranks - 1 if rows.parameter.has_k and rows.parameter.has_p else 1
    best = (4 * vocabulary.ranks * rows.logits.shape[1] / (thin * lists)) ** 0.5
    return max(1, min(rows.logits.shape[1], int(best))), thin


def begin(
    vocabulary: Vocabulary, tables: list[Table], *more: Tensor
) -> Callable[[], tuple[list[Distribution], list[Tensor]]]:
    """Start the first exchange; the returned function gives each table's distribution, and `more` of every rank."""
    fields: list[Tensor] = []
    ordered: list[Tensor | None] = []
    for rows in tables:
        maximum = rows.logits.amax(1)
        fields += [maximum, weights(rows.logits, maximum, rows.parameter.inv_t, rows.logits > -_INF).sum(1)]
        fields.append((rows.logits.argmax(1) + vocabulary.first).int())
        is_ordered = rows.parameter.has_ranks or rows.parameter.has_min_p
        falling = rows.logits.sort(dim=1, descending=True).values if is_ordered else None
        ordered.append(falling)
        if falling is not None and rows.parameter.has_ranks:
            step, _ = spacing(vocabulary, rows)
            fields.append(falling[:, step - 1 :: step])
    receive = vocabulary.send(*fields, *more)

    def finish() -> tuple[list[Distribution], list[Tensor]]:
        got = receive()
        statistics, samples = [], []
        for rows in tables:
            statistics.append(_merge(rows, *got[:3]))
            del got[:3]
            samples.append(got.pop(0) if rows.parameter.has_ranks else None)
        limits = _thresholds(vocabulary, tables, statistics, ordered, samples)
        distributions = [
            _distribution(vocabulary, rows, s, *limit)
            for rows, s, limit in zip(tables, statistics, limits, strict=True)
        ]
        return distributions, got

    return finish


def _merge(rows: Table, maximum: Tensor, mass: Tensor, argmax: Tensor) -> Statistics:
    highest = maximum.amax(0)
    bad = ~highest.isfinite()
    holds = maximum == highest
    lowest = torch.where(holds, argmax, torch.iinfo(torch.int32).max).amin(0).long()
    shift = (maximum.double() - highest.double()) * rows.parameter.inv_t.double()
    total = added(torch.where(maximum > -_INF, mass * shift.exp(), 0.0))
    return Statistics(
        torch.where(bad, 0.0, highest), torch.where(bad, 0, lowest), torch.where(bad, 1.0, total), bad
    )  # fmt: skip


def _distribution(
    vocabulary: Vocabulary, rows: Table, known: Statistics, threshold: Tensor, mass: Tensor
) -> Distribution:
    """The distribution around this rank's logits; `argmax` is an id of the whole vocabulary."""
    parameter = rows.parameter
    logits = torch.where(known.bad[:, None], -_INF, rows.logits)
    threshold = torch.where(known.bad, -_INF, torch.where(parameter.greedy, known.maximum, threshold))
    kept = (logits > -_INF) & (logits >= threshold[:, None])
    columns = torch.arange(logits.shape[1], device=logits.device) + vocabulary.first
    kept = torch.where(parameter.greedy[:, None], kept & (columns == known.argmax[:, None]), kept)
    mass = torch.where(parameter.greedy | known.bad, 1.0, mass)
    return Distribution(
        logits, parameter.inv_t, kept, known.maximum, known.argmax, threshold, mass, parameter.greedy, known.bad
    )  # fmt: skip


def _weights(values: Tensor, known: Statistics, parameter: Parameters) -> Tensor:
    """exp((value - maximum) / T), float64; 0 at -inf (and at +inf, which nothing reaches)."""
    return weights(values, known.maximum, parameter.inv_t, values.isfinite())


def _thresholds(
    vocabulary: Vocabulary, tables: list[Table], known: list[Statistics], ordered: list[Tensor | None],
    samples: list[Tensor | None],
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """(threshold, kept mass) of every row of every table, in as many exchanges as the widest of them needs."""
    searches = []
    for rows, statistics, values, sample in zip(tables, known, ordered, samples, strict=True):
        searches.append(None if values is None else _Search(vocabulary, rows, statistics, values, sample))
    live = [search for search in searches if search is not None]
    if live:
        got = vocabulary.send(*(field for search in live for field in search.counts()))()
        for search in live:
            search.bracket(*got[:3])
            del got[:3]
    listing = [search for search in live if search.rows.parameter.has_ranks]
    if listing:
        got = vocabulary.send(*(search.listed() for search in listing))()
        for search, lists in zip(listing, got, strict=True):
            search.settle(lists)
    return [
        (torch.full_like(statistics.maximum, -_INF), statistics.mass) if search is None else search.result
        for search, statistics in zip(searches, known, strict=True)
    ]


class _Search:
    """The thresholds of one table of rows, found in two exchanges."""

    def __init__(
        self, vocabulary: Vocabulary, rows: Table, known: Statistics, ordered: Tensor, samples: Tensor | None
    ) -> None:  # fmt: skip
        self.rows, self.known, self.ordered = rows, known, ordered
        parameter = rows.parameter
        offset = _rows._min_p_offset(parameter)
        self.min_p = torch.where(parameter.min_p > 0, known.maximum + offset, -_INF)
        edge = torch.full_like(self.min_p, _INF)
        step, thin = spacing(vocabulary, rows)
        points = torch.stack([edge, self.min_p, -edge], 1)
        if samples is not None:
            chosen = samples.permute(1, 0, 2).flatten(1).sort(dim=1, descending=True).values[:, thin - 1 :: thin]
            points = torch.cat([points, chosen], 1)
        self.points = points.sort(dim=1, descending=True).values
        self.cell = thin * step - 1  # logits of a rank strictly between two neighbours, at most
        in_all = (thin - 1 + vocabulary.ranks) * step - vocabulary.ranks  # of all ranks
        self.far = in_all + 1 + self.cell if parameter.has_k and parameter.has_p else 0
        self.has_k = (parameter.top_k > 0) & (parameter.top_k < vocabulary.size)

    def counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's logits >= and > each point, and the mass of the latter."""
        rising = -self.ordered
        reached = torch.searchsorted(rising, -self.points, right=True)
        above = torch.searchsorted(rising, -self.points)
        weight = _weights(self.ordered, self.known, self.rows.parameter)
        cumulative = torch.nn.functional.pad(weight.cumsum(1), (1, 0))
        return reached.int(), above.int(), cumulative.gather(1, above)

    def bracket(self, reached: Tensor, above: Tensor, mass_above: Tensor) -> None:
        """Bracket both thresholds between points of the grid."""
        parameter = self.rows.parameter
        reached, above, mass = reached.long().sum(0), above.long().sum(0), added(mass_above)
        ties = (reached - above).double() * _weights(self.points, self.known, parameter)
        grid = Grid(self.points, reached, above, mass + ties, mass)
        k = parameter.top_k[:, None]
        k_low = _first(grid.reached >= k)
        k_high = (k_low - 1).clamp(min=0)
        # The k-th largest is the lower point itself, or lies inside the cell above it.
        self.is_inside = self.has_k & (at(grid.above, k_low) >= parameter.top_k)
        exact = torch.where(self.has_k & ~self.is_inside, at(grid.point, k_low), -_INF)
        start = torch.maximum(self.min_p, exact)
        self.is_inside &= at(grid.point, k_high) > self.min_p  # else min-p decides
        self.k_from, self.k_to = at(grid.point, k_high), at(grid.point, k_low)
        self.k_count, self.k_mass = at(grid.reached, k_high), at(grid.mass, k_high)
        self.start, self.start_mass = start, at(grid.mass, _first(grid.point <= start[:, None]))
        fewest = torch.where(self.is_inside, self.k_mass, self.start_mass)
        most = torch.where(self.is_inside, at(grid.mass_above, k_low), self.start_mass)
        self.result = (self.start, self.start_mass)  # where min-p is all there is
        top_p = parameter.top_p.double()
        p_near = _first(grid.mass >= (top_p * fewest)[:, None]).clamp(min=1)
        p_far = torch.maximum(_first(grid.mass >= (top_p * most)[:, None]), p_near)
        self.p_point = [at(grid.point, index) for index in (p_near - 1, p_near, p_far)]
        self.p_mass = [at(grid.mass, index) for index in (p_near - 1, p_near, p_far)]

    def listed(self) -> Tensor:
        """This rank's logits inside the brackets, [rows, listed], -inf where there are fewer."""
        near, middle, far = self.p_point
        lists = [self._between(self.k_from, self.k_to, self.cell if self.rows.parameter.has_k else 0)]
        if self.rows.parameter.has_p:
            lists += [self._between(near, middle, self.cell), self._between(middle, far, self.far)]
        return torch.cat(lists, 1)

    def _between(self, high: Tensor, low: Tensor, length: int) -> Tensor:
        """The largest logits strictly between two values."""
        begin = torch.searchsorted(-self.ordered, -high[:, None], right=True)
        position = begin + torch.arange(length, device=begin.device)
        last = self.ordered.shape[1] - 1
        value = self.ordered.gather(1, position.clamp(max=last))
        return torch.where((position <= last) & (value > low[:, None]), value, -_INF)

    def settle(self, lists: Tensor) -> None:
        """Both thresholds, from what all ranks have inside the brackets."""
        parameter = self.rows.parameter
        sizes = [self.cell if parameter.has_k else 0, *([self.cell, self.far] if parameter.has_p else [])]
        inside = [part.permute(1, 0, 2).flatten(1) for part in lists.split(sizes, dim=2)]
        start, mass = self.start, self.start_mass
        if parameter.has_k and self.cell:
            ordered = inside[0].sort(dim=1, descending=True).values
            rank = (parameter.top_k - self.k_count - 1).clamp(0, ordered.shape[1] - 1)
            start = torch.where(self.is_inside, torch.maximum(at(ordered, rank), start), start)
            mass = torch.where(self.is_inside, self.k_mass + self._mass(inside[0], start), mass)
        self.result = (start, mass)
        if not parameter.has_p:
            return
        goal = parameter.top_p.double() * mass
        edge, edge_mass = self.p_point[2], self.p_mass[2]
        found = torch.zeros_like(parameter.greedy)
        for values, index in ((inside[1], 0), (None, 1), (inside[2], 1)):
            point, reached = self.p_point[index], self.p_mass[index]
            if values is not None:
                if not values.shape[1]:
                    continue
                ordered = values.sort(dim=1, descending=True).values
                enough = reached[:, None] + _weights(ordered, self.known, parameter).cumsum(1) >= goal[:, None]
                point = ordered.gather(1, enough.int().argmax(1, keepdim=True)).squeeze(1)
                reached = torch.where(enough.any(1) & point.isfinite(), reached + self._mass(values, point), -_INF)
            here = ~found & (reached >= goal)
            edge, edge_mass = torch.where(here, point, edge), torch.where(here, reached, edge_mass)
            found = found | here
        raises = (parameter.top_p < 1) & (edge > start)
        self.result = (torch.where(raises, edge, start), torch.where(raises, edge_mass, mass))

    def _mass(self, values: Tensor, point: Tensor) -> Tensor:
        weight = _weights(values, self.known, self.rows.parameter)
        return torch.where(values >= point[:, None], weight, 0.0).sum(1)


def _first(mask: Tensor) -> Tensor:
    """Index [rows] of the first True."""
    return mask.int().argmax(1)
