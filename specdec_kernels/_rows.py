"""Rows of logits as distributions, in plain PyTorch: temperature, filters, probabilities, draws. The definition.

A distribution is kept as the raw row plus a handful of numbers (maximum, threshold, mass); kernels keep the same
numbers and never write a probability row. Sums run in float64 here, so that this file is the most exact spelling there
is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _random
from ._edits import RowEdits
from ._types import Sampling

TINY = 2.0**-126  # smallest normal float32: residual weights below it do not compete
_INF = float("inf")


class Parameters(NamedTuple):
    """Sampling parameters of a batch with the rules for bad values applied; each is [batch]."""

    temperature: Tensor  # float32; 1 where greedy
    inv_t: Tensor  # float32, 1 / temperature
    top_k: Tensor  # int64; 0 is off
    top_p: Tensor  # float32; 1 is off
    min_p: Tensor  # float32; 0 is off
    greedy: Tensor  # bool
    bad: Tensor  # bool: status bit 64
    has_k: bool  # whether any row may have a top-k
    has_p: bool
    has_min_p: bool

    @property
    def has_ranks(self) -> bool:
        """Whether a threshold depends on more than the maximum: only then a row is sorted."""
        return self.has_k or self.has_p

    def of_rows(self, request: Tensor) -> Parameters:
        """Parameters of each row, given the request of each."""
        return Parameters(*(field[request] for field in self[:-3]), *self[-3:])  # type: ignore[call-arg,arg-type]


class Distribution(NamedTuple):
    """Distribution of each row: softmax of logits * inv_t over the kept ids; greedy: a point mass at the argmax."""

    logits: Tensor  # float32 [batch, vocab], -inf where not allowed
    inv_t: Tensor  # float32 [batch]
    kept: Tensor  # bool [batch, vocab]
    maximum: Tensor  # float32 [batch], raw logit
    argmax: Tensor  # int64 [batch], lowest id of the maximum
    threshold: Tensor  # float32 [batch], raw logit
    mass: Tensor  # float64 [batch], sum over kept of exp((logit - maximum) * inv_t)
    greedy: Tensor  # bool [batch]
    bad: Tensor  # bool [batch]: NaN, or no finite maximum

    def probs(self) -> Tensor:
        """float64 [batch, vocab]."""
        return weights(self.logits, self.maximum, self.inv_t, self.kept) / self.mass[:, None]

    def log_weights(self) -> Tensor:
        """float32 [batch, vocab]: (logit - maximum) * inv_t, which a race adds to its noise; 0 at the maximum."""
        return (self.logits - self.maximum[:, None]) * self.inv_t[:, None]

    def logsumexp(self) -> Tensor:
        """float32 [batch]: log-sum of the scaled kept logits; 0 for a point mass."""
        value = self.maximum.double() * self.inv_t.double() + self.mass.log()
        return torch.where(self.greedy, 0.0, value).float()

    def logprob(self, logit: Tensor) -> Tensor:
        """float32 [batch, n]: log-probabilities of ids, given their logits; NaN where the row is bad."""
        value = (logit.double() - self.maximum.double()[:, None]) * self.inv_t.double()[:, None]
        value = (value - self.mass.log()[:, None]).float()
        value = torch.where((logit >= self.threshold[:, None]) & (logit > -_INF), value, -_INF)
        return torch.where(self.bad[:, None], float("nan"), value)

    def take(self, rows: Tensor) -> Distribution:
        """Some rows."""
        return Distribution(*(part[rows] for part in self))


def parameters(batch: int, device: torch.device, sampling: Sampling) -> Parameters:
    """Fill in what is off and turn bad values into greedy requests."""
    temperature, top_k, top_p, min_p, _ = sampling
    t = torch.ones(batch, dtype=torch.float32, device=device) if temperature is None else temperature
    k = torch.zeros(batch, dtype=torch.int64, device=device) if top_k is None else top_k.to(torch.int64)
    p = torch.ones(batch, dtype=torch.float32, device=device) if top_p is None else top_p
    m = torch.zeros(batch, dtype=torch.float32, device=device) if min_p is None else min_p
    bad = t.isnan() | (t < 0) | (k < 0) | p.isnan() | m.isnan()
    greedy = bad | (t == 0) | (1.0 / t).isinf()
    t = torch.where(greedy, 1.0, t)
    off = greedy | (k <= 0)
    return Parameters(
        t,
        1.0 / t,
        torch.where(off, 0, k),
        torch.where(greedy | (p >= 1), 1.0, p),
        torch.where(greedy | (m <= 0), 0.0, m),
        greedy,
        bad,
        top_k is not None,
        top_p is not None,
        min_p is not None,
    )


def of_active(sampling: Sampling, values: Tensor, idle: int = 0) -> Tensor:
    """A result [batch, ...] of a call, with `idle` for requests that are not active."""
    if sampling.active is None or not values.numel():
        return values
    return torch.where(sampling.active.view(-1, *[1] * (values.dim() - 1)), values, idle)


def weights(logits: Tensor, maximum: Tensor, inv_t: Tensor, kept: Tensor) -> Tensor:
    """exp((logit - maximum) * inv_t) over the kept ids, else 0; float64 [batch, vocab]."""
    exponent = (logits.double() - maximum.double()[:, None]) * inv_t.double()[:, None]
    return torch.where(kept, exponent, -_INF).exp()


def _min_p_offset(parameter: Parameters) -> Tensor:
    """T log(min_p): how far below the maximum a kept logit may lie."""
    offset = parameter.temperature * _random.log(parameter.min_p.clamp(min=TINY))
    return torch.where(parameter.min_p >= 1, 0.0, offset)


def mask_allowed(logits: Tensor, allowed: Tensor | None, first: int = 0) -> Tensor:
    """Logits of ids from `first` as float32, -inf where the packed bits [batch, ceil(vocab / 32)] of all ids are 0."""
    logits = logits.float()
    if allowed is None:
        return logits
    ids = torch.arange(first, first + logits.shape[1], device=logits.device).clamp(max=32 * allowed.shape[1] - 1)
    bit = (allowed[:, ids >> 5] >> (ids & 31).to(torch.int32)) & 1
    return torch.where(bit == 1, logits, -_INF)


def edited(logits: Tensor, allowed: Tensor | None, edits: RowEdits, first: int = 0) -> Tensor:
    """Logits [rows, columns] as a row's distribution sees them: this rank's edits, then the mask."""
    return mask_allowed(edits.apply(logits), allowed, first)


def _rank_threshold(logits: Tensor, maximum: Tensor, threshold: Tensor, parameter: Parameters) -> Tensor:
    """Raise the min-p threshold [batch] to that of top-k, then of top-p, by sorting."""
    ordered = logits.sort(dim=1, descending=True).values
    has_k = (parameter.top_k > 0) & (parameter.top_k < logits.shape[1])
    kth = ordered.gather(1, (parameter.top_k.clamp(1, logits.shape[1]) - 1)[:, None]).squeeze(1)
    threshold = torch.where(has_k, torch.maximum(threshold, kth), threshold)

    kept_ordered = (ordered >= threshold[:, None]) & (ordered > -_INF)
    weight = weights(ordered, maximum, parameter.inv_t, kept_ordered)
    cumulative = weight.cumsum(1)
    reaches = cumulative >= parameter.top_p.double()[:, None] * weight.sum(1, keepdim=True)
    edge = ordered.gather(1, reaches.int().argmax(1, keepdim=True)).squeeze(1)
    has_p = (parameter.top_p < 1) & reaches.any(1)
    return torch.where(has_p, torch.maximum(threshold, edge), threshold)


def distribution(logits: Tensor, parameter: Parameters) -> Distribution:
    """The distribution of each row, float32 [batch, vocab], after temperature, min-p, top-k and top-p."""
    vocab = logits.shape[1]
    maximum = logits.amax(1)
    bad = ~maximum.isfinite()
    safe = torch.where(bad[:, None], 0.0, logits)  # a bad row is never used; keep its numbers finite
    maximum = safe.amax(1)
    argmax = (safe == maximum[:, None]).int().argmax(1)
    finite = safe > -_INF

    threshold = torch.where(parameter.min_p > 0, maximum + _min_p_offset(parameter), -_INF)
    if parameter.has_ranks:
        threshold = _rank_threshold(safe, maximum, threshold, parameter)
    threshold = torch.where(parameter.greedy, maximum, threshold)
    kept = finite & (safe >= threshold[:, None])
    first = torch.arange(vocab, device=logits.device) == argmax[:, None]
    kept = torch.where(parameter.greedy[:, None], first, kept)
    mass = weights(safe, maximum, parameter.inv_t, kept).sum(1)
    return Distribution(safe, parameter.inv_t, kept, maximum, argmax, threshold, mass, parameter.greedy, bad)


def race_scores(logweight: Tensor, competes: Tensor, noise: Tensor) -> Tensor:
    """Score of each competitor (float32 [batch, vocab]), -inf for the others; noise: `_random.vocab_noise`."""
    score = logweight - _random.log(noise)
    return torch.where(competes & score.isfinite(), score, -_INF)


def plain_scores(row: Distribution, noise: Tensor, exclude: Tensor | None = None) -> Tensor:
    """Race scores of a plain draw; `exclude` bool [batch, vocab] takes ids out of it."""
    competes = row.kept if exclude is None else row.kept & ~exclude
    return race_scores(row.log_weights(), competes, noise)


def residual_scores(weight: Tensor, noise: Tensor) -> Tensor:
    """Race scores of a draw from weights, float32 [batch, vocab], not normalised."""
    return race_scores(_random.log(weight.clamp(min=TINY)), weight >= TINY, noise)
