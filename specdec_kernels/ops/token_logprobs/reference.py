"""token_logprobs, spelled plainly: sort what each row keeps. `_scores` has the definition."""

from __future__ import annotations

from torch import Tensor

from ..._edits import RowEdits
from ..._scores import score
from ..._types import Sampling
from ..._vocabulary import Vocabulary


def token_logprobs(
    logits: Tensor, token_ids: Tensor, top: int, sampling: Sampling, allowed: Tensor | None, edits: RowEdits
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.token_logprobs`; raw: without sampling parameters, mask and edits."""
    return score(Vocabulary(logits.shape[1]), logits, token_ids, top, sampling, allowed, edits)
