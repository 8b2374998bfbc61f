"""`sample` over a sharded vocabulary: the distribution of each row, then one race; 2 exchanges, 4 with filters."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _random, _rows
from .._codes import RAW_LOGPROBS, Status
from .._rows import Distribution
from .._types import SampleArguments, Sampling
from . import races
from .agreed import Rows, begin
from .group import Shards


def pad(logits: Tensor, width: int) -> Tensor:
    """Rows as float32, as wide as those of the widest rank."""
    return torch.nn.functional.pad(logits.float(), (0, width - logits.shape[-1]), value=-torch.inf)


def mask_allowed(shards: Shards, logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Padded rows with -inf where the packed bits of the whole vocabulary are 0."""
    if allowed is None:
        return logits
    column = shards.columns(logits.device).clamp(max=shards.size - 1)
    bit = (allowed[:, column >> 5] >> (column & 31).to(torch.int32)) & 1
    return torch.where(bit == 1, logits, -torch.inf)


def filters(sampling: Sampling) -> tuple[bool, bool, bool]:
    """Which of top-k, top-p, min-p may be on."""
    return sampling.top_k is not None, sampling.top_p is not None, sampling.min_p is not None


def log_probability(distribution: Distribution, logit: Tensor) -> Tensor:
    """float32 [rows, ...]: log-probability of ids, given their logits; NaN where the row is bad."""
    shape = (-1, *[1] * (logit.dim() - 1))
    value = (logit.double() - distribution.maximum.double().view(shape)) * distribution.inv_t.double().view(shape)
    value = (value - distribution.mass.log().view(shape)).float()
    value = torch.where((logit >= distribution.threshold.view(shape)) & (logit > -torch.inf), value, -torch.inf)
    return torch.where(distribution.bad.view(shape), float("nan"), value)


def sample(shards: Shards, given: SampleArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.sample`."""
    logits, token_map = given.logits, given.token_map
    batch, device = logits.shape[0], logits.device
    parameter = _rows.parameters(batch, device, given.sampling)
    padded = pad(logits, shards.widest)
    tables = [Rows(mask_allowed(shards, padded, given.allowed), parameter, *filters(given.sampling))]
    if given.logprobs_mode == RAW_LOGPROBS:
        tables.append(Rows(padded, _rows.parameters(batch, device, Sampling()), *filters(Sampling())))
    finish = begin(shards, tables)

    ids = shards.columns(device)
    if token_map is None:
        noise = races.noise(shards, given.rng, given.purpose, given.lane)
    else:
        ids = torch.nn.functional.pad(token_map.long(), (0, shards.widest - logits.shape[1]))
        noise = _random.noise_of(given.rng, given.purpose, given.lane, ids)
    excluded = torch.zeros(batch, shards.widest, dtype=torch.bool, device=device)
    if given.exclude_ids is not None:
        for j in range(given.exclude_ids.shape[1]):
            excluded = excluded | (ids == given.exclude_ids[:, j : j + 1])
    (distribution, *raw), _ = finish()

    score = _rows.plain_scores(distribution, noise, excluded)
    source = raw[0] if raw else distribution
    message = races.best(score, ids, source.logits, given.num_samples)
    won = races.winner(*shards.send(*message)())
    drawn = (won.ids >= 0) & ~distribution.bad[:, None]
    status = torch.where(parameter.bad, Status.BAD_SAMPLING, 0)
    status = status | torch.where(distribution.bad, Status.BAD_TARGET, 0)
    nan = torch.full_like(distribution.maximum, float("nan"))
    return (
        torch.where(drawn, won.ids, -1),
        torch.where(drawn, log_probability(source, won.logit), 0.0),
        torch.where(distribution.bad, nan, distribution.logsumexp()),
        torch.where(distribution.bad, nan, distribution.threshold),
        status.int(),
    )
