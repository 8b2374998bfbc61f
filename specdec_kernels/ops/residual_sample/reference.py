"""residual_sample, spelled plainly: one id a row from norm((a p - b q)+). The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _random, _rows
from ..._codes import TARGET_PURPOSE, Status
from ..._residual import residual


def residual_sample(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    a: Tensor,
    b: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    draft_temperature: Tensor | None,
    draft_top_k: Tensor | None,
    draft_top_p: Tensor | None,
    draft_min_p: Tensor | None,
    token_map: Tensor | None,
    allowed: Tensor | None,
    draft_ids: Tensor | None,
    seed: Tensor,
    position: Tensor,
    step: Tensor | None,
    purpose: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec_kernels.residual_sample`."""
    r = residual(
        target_logits, draft_logits, a, b, temperature, top_k, top_p, min_p,
        draft_temperature, draft_top_k, draft_top_p, draft_min_p, token_map, allowed, draft_ids,
    )  # fmt: skip
    vocab = target_logits.shape[1]
    word = _random.vocab_words(seed, position, None if purpose == TARGET_PURPOSE else step, purpose, None, vocab)
    drawn, _ = _rows.residual_draw(r.weight, word)
    # Where q is a point mass the other ids keep their plain weights (as verify_chain draws), and the id itself what
    # is left of its own: log(a p - b) - log(a) relative to them.
    point = torch.nn.functional.one_hot(r.ids, vocab).bool() & r.point[:, None]
    rest = r.weight.gather(1, r.ids[:, None])
    share = rest / (a.float()[:, None] * r.row.probs().float().gather(1, r.ids[:, None])).clamp(min=_rows.TINY)
    plain_weight = r.row.logits * r.row.inv_t[:, None]
    left = plain_weight + _random.log(share.clamp(min=_rows.TINY))
    scores = _rows.race_scores(
        torch.where(point, left, plain_weight), r.row.kept & (~point | (rest >= _rows.TINY)), word
    )
    by_race = torch.where(scores.amax(1) > -torch.inf, scores.argmax(1), r.row.argmax)
    empty = (r.status & Status.EMPTY_RESIDUAL) != 0
    token = torch.where(r.point, by_race, torch.where(r.plain | empty, _rows.plain_draw(r.row, word), drawn))
    token = torch.where(r.point & empty, _rows.plain_draw(r.row, word), token)
    return torch.where(r.row.bad, -1, token), r.mass, r.status.int()
