"""sample, spelled plainly: the best `num_samples` ids of one race a row. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _random, _rows
from ..._codes import RAW_LOGPROBS, Status
from ..._types import SampleArguments, Sampling

_INF = float("inf")


def sample(given: SampleArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.sample`."""
    logits, token_map, num_samples = given.logits, given.token_map, given.num_samples
    batch, vocab = logits.shape
    parameter = _rows.parameters(batch, logits.device, given.sampling)
    distribution = _rows.distribution(logits, parameter, given.allowed)
    status = torch.where(parameter.bad, Status.BAD_SAMPLING, 0)
    status = status | torch.where(distribution.bad, Status.BAD_TARGET, 0)

    columns = torch.arange(vocab, device=logits.device)
    ids = columns if token_map is None else token_map.long()
    if token_map is None:
        noise = _random.vocab_noise(given.rng, given.purpose, given.lane, vocab)
    else:
        noise = _random.noise_of(given.rng, given.purpose, given.lane, ids)
    excluded = torch.zeros_like(distribution.kept)
    if given.exclude_ids is not None:
        for j in range(given.exclude_ids.shape[1]):
            excluded = excluded | (ids == given.exclude_ids[:, j : j + 1])
    score = _rows.plain_scores(distribution, noise, excluded)
    # Stable sorts: first by target id, then by score, so that ties go to the lowest target id.
    by_id = ids.argsort(stable=True)
    order = by_id[score[:, by_id].sort(dim=1, descending=True, stable=True).indices[:, :num_samples]]
    drawn = score.gather(1, order) > -_INF
    drawn = drawn & ~distribution.bad[:, None]

    token_ids = logits.new_full((batch, num_samples), -1, dtype=torch.int64)
    token_ids[:, : order.shape[1]] = torch.where(drawn, ids[order], -1)
    logprobs = logits.new_zeros((batch, num_samples), dtype=torch.float32)
    source = distribution
    if given.logprobs_mode == RAW_LOGPROBS:
        source = _rows.distribution(logits, _rows.parameters(batch, logits.device, Sampling()))
    for j in range(order.shape[1]):
        logprobs[:, j] = torch.where(drawn[:, j], source.logprob(order[:, j]), 0.0)
    nan = torch.full_like(distribution.maximum, float("nan"))
    return (
        token_ids,
        logprobs,
        torch.where(distribution.bad, nan, distribution.logsumexp()),
        torch.where(distribution.bad, nan, distribution.threshold),
        status.int(),
    )
