"""Draft rows of which only the candidates were kept: few ids each, and the sum that makes them a distribution.

Where q is 0 nothing is stored: `SparseRows` of k of 128,256 ids take k / 128,256 of the memory of dense rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_KEPT = 1024  # candidates of a row
_INF = float("inf")


class SparseRows(NamedTuple):
    """Draft rows by their candidates: ``q(ids[j]) = exp(logits[j] / T - logsumexp)``, and 0 for every other id.

    `verify_chain` and `verify_tree` take it as `draft_logits`; `SampleResult.keep` makes it. A row is flagged
    (status 2) where an id stands twice or lies outside the vocabulary, or the probabilities do not sum to 1.

    Attributes:
        ids: int32 or int64 ``[..., k]``, in any order, those of a row all different; k is at most 1024. -1 pads a
            shorter row, with a logit of -inf.
        logits: float32, bfloat16 or float16 ``[..., k]``: their logits as the model gave them, before temperature.
        logsumexp: float32 ``[...]``: of ``logits / T`` over the candidates.

    Example:
        >>> import torch
        >>> from specdec_kernels import SparseRows
        >>> logits = torch.tensor([[2.0, 1.0]])
        >>> SparseRows(torch.tensor([[3, 0]]), logits, logits.logsumexp(1)).dense(5)
        tensor([[1., -inf, -inf, 2., -inf]])
    """

    ids: Tensor
    logits: Tensor
    logsumexp: Tensor

    def dense(self, vocab: int) -> Tensor:
        """The same rows with a logit for every id, [..., vocab]: for tests and for code that wants dense rows."""
        place = torch.where((self.ids >= 0) & (self.ids < vocab), self.ids, vocab).long()
        rows = self.logits.new_full((*self.logits.shape[:-1], vocab + 1), -_INF)
        return rows.scatter(-1, place, self.logits)[..., :vocab]


def is_bad(ids: Tensor, logits: Tensor, logsumexp: Tensor, inv_t: Tensor, vocab: int) -> Tensor:
    """Whether candidates [rows, k] are no distribution, bool [rows].

    An id outside that is not padding, one twice, NaN, no finite logit, or a log-sum other than the one given.
    """
    padding = (ids == -1) & (logits == -_INF)
    outside = ((ids < 0) | (ids >= vocab)) & ~padding
    ordered = torch.where(padding, -1, ids).sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    logits = logits.float()
    maximum = logits.amax(1)
    exponent = (logits - maximum[:, None]).double() * inv_t.double()[:, None]
    mass = torch.where(logits > -_INF, exponent, -_INF).exp().sum(1)
    differs = (maximum.double() * inv_t.double() + mass.log() - logsumexp.double()).abs()
    sums_to_one = differs <= 2.0**-10 + 2.0**-22 * logsumexp.double().abs()  # false for NaN
    return outside.any(1) | twice.any(1) | ~maximum.isfinite() | ~sums_to_one
