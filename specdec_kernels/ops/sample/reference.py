"""sample, spelled plainly: the best `num_samples` ids of one race a row. The definition of the op."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ... import _random, _rows, _vocabulary
from ..._codes import RAW_LOGPROBS, Status
from ..._scores import list_tokens, score
from ..._types import SampleArguments, Sampling
from ..._vocabulary import Table, Vocabulary


def sample(
    given: SampleArguments, *, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `specdec_kernels.sample`; a part of a `vocabulary` takes 2 exchanges, 4 with filters."""
    vocabulary = vocabulary or Vocabulary(given.logits.shape[-1])
    batch, device = given.logits.shape[0], given.logits.device
    parameter = _rows.parameters(batch, device, given.sampling)
    padded = vocabulary.pad(given.logits)
    tables = [Table(_rows.edited(padded, given.allowed, given.edits, vocabulary.first), parameter)]
    if given.logprobs_mode == RAW_LOGPROBS:
        tables.append(Table(padded, _rows.parameters(batch, device, Sampling())))
    finish = vocabulary.distributions(tables)

    ids = vocabulary.columns(device)
    if given.token_map is None:
        noise = vocabulary.noise(given.rng, given.purpose, given.lane)
    else:
        ids = torch.nn.functional.pad(given.token_map.long(), (0, vocabulary.widest - len(given.token_map)))
        noise = _random.noise_of(given.rng, given.purpose, given.lane, ids)
    excluded = torch.zeros_like(padded, dtype=torch.bool)
    if given.exclude_ids is not None:
        for j in range(given.exclude_ids.shape[1]):
            excluded = excluded | (ids == given.exclude_ids[:, j : j + 1])
    (distribution, *raw), _ = finish()

    scores = _rows.plain_scores(distribution, noise, excluded)
    source = raw[0] if raw else distribution
    won = _vocabulary.winner(*vocabulary.send(*_vocabulary.best(scores, ids, source.logits, given.num_samples))())
    drawn = (won.ids >= 0) & ~distribution.bad[:, None]
    status = torch.where(parameter.bad, Status.BAD_SAMPLING, 0)
    status = status | torch.where(distribution.bad, Status.BAD_TARGET, 0)
    nan = torch.full_like(distribution.maximum, float("nan"))
    return (
        _rows.of_active(given.sampling, torch.where(drawn, won.ids, -1), -1),
        _rows.of_active(given.sampling, torch.where(drawn, source.logprob(won.logit), 0.0)),
        _rows.of_active(given.sampling, torch.where(distribution.bad, nan, distribution.logsumexp())),
        _rows.of_active(given.sampling, torch.where(distribution.bad, nan, distribution.threshold)),
        _rows.of_active(given.sampling, status.int()),
    )


def sample_listed(
    top: int, given: SampleArguments, *, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same with `top`: the results of `sample`, then ranks, top_ids and top_logprobs of its tokens."""
    drawn = sample(given, vocabulary=vocabulary)
    return *drawn, *list_tokens(partial(score, vocabulary), given, top, drawn)
