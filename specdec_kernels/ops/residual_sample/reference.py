"""residual_sample, spelled plainly: one id a row from norm((a p - b q)+). The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _random, _rows
from ..._codes import Status
from ..._residual import residual
from ..._types import ResidualArguments, RngKey


def residual_sample(given: ResidualArguments, rng: RngKey, purpose: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec_kernels.residual_sample`."""
    r = residual(given)
    vocab = given.target_logits.shape[1]
    noise = _random.vocab_noise(rng, purpose, None, vocab)
    drawn = _rows.residual_scores(r.weight, noise).argmax(1)
    # Where q is a point mass the other ids keep their plain weights (as verify_chain draws), and the id itself what
    # is left of its own: log(a p - b) - log(a) relative to them.
    point = torch.nn.functional.one_hot(r.ids, vocab).bool() & r.point[:, None]
    rest = r.weight.gather(1, r.ids[:, None])
    share = rest / (given.a.float()[:, None] * r.row.probs().float().gather(1, r.ids[:, None])).clamp(min=_rows.TINY)
    plain_weight = r.row.log_weights()
    left = plain_weight + _random.log(share.clamp(min=_rows.TINY))
    scores = _rows.race_scores(
        torch.where(point, left, plain_weight), r.row.kept & (~point | (rest >= _rows.TINY)), noise
    )
    empty = (r.status & Status.EMPTY_RESIDUAL) != 0
    token = torch.where(r.point, scores.argmax(1), torch.where(r.plain | empty, _rows.plain_draw(r.row, noise), drawn))
    token = torch.where(r.point & empty, _rows.plain_draw(r.row, noise), token)
    token = torch.where(r.row.bad, -1, token)
    return (
        _rows.of_active(given.sampling, token, -1),
        _rows.of_active(given.sampling, r.mass),
        _rows.of_active(given.sampling, r.status.int()),
    )
