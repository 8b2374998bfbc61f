"""residual_sample, spelled plainly: one id a row from norm((a p - b q)+). The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _random, _rows, _vocabulary
from ..._residual import residual
from ..._types import ResidualArguments, RngKey
from ..._vocabulary import Vocabulary, added


def residual_sample(
    given: ResidualArguments, rng: RngKey, purpose: int, *, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec_kernels.residual_sample`; a part of a `vocabulary` takes 2 exchanges, 4 with filters."""
    vocabulary = vocabulary or Vocabulary(given.target_logits.shape[-1])
    r = residual(given, vocabulary)
    noise, ids = vocabulary.noise(rng, purpose), vocabulary.columns(given.target_logits.device)
    # Where q is a point mass the other ids keep their plain weights (as verify_chain draws), and the id itself what
    # is left of its own: log(a p - b) - log(a) relative to them.
    share = r.weight / (given.a.float()[:, None] * r.row.probs().float()).clamp(min=_rows.TINY)
    weights = r.row.log_weights()
    left = torch.where(r.at_point, weights + _random.log(share.clamp(min=_rows.TINY)), weights)
    scores = _rows.race_scores(left, r.row.kept & (~r.at_point | (r.weight >= _rows.TINY)), noise)
    corrected = torch.where(r.point[:, None], scores, _rows.residual_scores(r.weight, noise))
    plain = _rows.plain_scores(r.row, noise)
    races = [part for score in (corrected, plain) for part in _vocabulary.best(score, ids, r.row.logits)]
    total, count, *won = vocabulary.send(*r.sums, *races)()
    mass, empty, status = r.settle(added(total), added(count))
    from_residual, from_target = (_vocabulary.winner(*won[i : i + 3]).ids[:, 0] for i in (0, 3))
    token = torch.where(r.plain | empty, from_target, from_residual)
    return (
        _rows.of_active(given.sampling, torch.where(r.row.bad, -1, token), -1),
        _rows.of_active(given.sampling, mass),
        _rows.of_active(given.sampling, status.int()),
    )
