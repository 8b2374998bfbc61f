"""count_tokens beside dense counts, which take four bytes for each id of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import TokenCounts, count_tokens

from .cases import DEVICE
from .edits import EditCase, cases, edit_input
from .minimum import moved
from .suite import Run

QUICK = 1
CASES = cases("count_tokens")[:2]


class Counted(NamedTuple):
    """What a step emitted, and the texts so far."""

    counts: TokenCounts
    dense: Tensor  # int32 [batch, vocab]
    tokens: Tensor  # int64 [batch, draft + 1]


def inputs(case: EditCase) -> list[Counted]:
    """One step."""
    x = edit_input(case)
    dense = torch.zeros(case.batch, case.vocab, dtype=torch.int32, device=DEVICE)
    dense.scatter_add_(1, x.output, torch.ones_like(x.output, dtype=torch.int32))
    return [Counted(x.edits.counts, dense, torch.cat([x.draft_ids, x.output[:, :1]], 1))]


def ours(case: EditCase, x: Counted, backend: str) -> Tensor:
    """One call of the package."""
    return count_tokens(x.counts, x.tokens, backend=backend)


def minimum(case: EditCase, x: Counted, result: Tensor) -> int:
    """Bytes of the tokens, and an id and a count of each, the count written."""
    return moved(x.tokens, result) + 12 * x.tokens.numel()


def check(case: EditCase, run: Run, x: Counted) -> None:
    """Every count rises by what was emitted."""
    counts = TokenCounts(*(part.clone() for part in x.counts if part is not None))
    run(x._replace(counts=counts))
    for b, tokens in enumerate(x.tokens.tolist()):
        before, after = x.counts.of(b), counts.of(b)
        for token in set(tokens):
            assert after[token][0] == before.get(token, (0, False))[0] + tokens.count(token), f"count of {token}"


def check_rival(case: EditCase, run: Run, x: Counted) -> None:
    """The same of the dense counts."""
    before = x.dense.clone()
    run(x)
    assert int((x.dense - before).sum()) == x.tokens.numel(), "tokens are missing"
    x.dense.copy_(before)


def rivals(case: EditCase, made: Sequence[Counted]) -> dict[str, Run]:
    """One."""
    one = torch.ones_like(made[0].tokens, dtype=torch.int32)
    return {"dense counts": lambda x: x.dense.scatter_add_(1, x.tokens, one)}
