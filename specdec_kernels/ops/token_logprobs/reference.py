"""token_logprobs, spelled plainly: sort what each row keeps. `_scores` has the definition."""

from __future__ import annotations

from torch import Tensor

from ..._edits import RowEdits
from ..._scores import score
from ..._types import Sampling
from ..._vocabulary import Vocabulary


def token_logprobs(
    logits: Tensor, token_ids: Tensor, top: int, sampling: Sampling, allowed: Tensor | None, edits: RowEdits, *,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `specdec_kernels.token_logprobs`; raw: without sampling parameters, mask and edits."""
    return score(vocabulary, logits, token_ids, top, sampling, allowed, edits)
