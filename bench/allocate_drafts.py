"""allocate_drafts beside PyTorch as people write it: cumprod, sort, cumsum, and a boolean mask, which waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import DraftAllocation, allocate_drafts

from .cases import DEVICE, OpCase
from .minimum import moved
from .suite import Run


@dataclass(frozen=True)
class BudgetCase(OpCase):
    """One batch; drafts cost 1/500 of a step each, and more the more there are."""

    batch: int = 256
    draft: int = 8
    budget: int = 512
    has_cost: bool = True

    @property
    def words(self) -> str:
        """Sizes."""
        return f"batch {self.batch}, K {self.draft}, budget {self.budget}" + (", cost" if self.has_cost else "")


class Drafted(NamedTuple):
    """Drafts of a batch."""

    draft_ids: Tensor  # int64 [batch, draft]
    confidence: Tensor  # float32 [batch, draft]
    cost: Tensor | None  # float32 [budget + 1]


QUICK = 2
OP = "allocate_drafts"
CASES = [
    BudgetCase(OP),
    BudgetCase(OP, has_cost=False),
    BudgetCase(OP, 32, 5, 64),
    BudgetCase(OP, 1024, 8, 2048),
    BudgetCase(OP, 1024, 64, 4096, threads=1),  # torch sorts this many on all threads, in times that vary threefold
]


def inputs(case: BudgetCase) -> list[Drafted]:
    """Ragged drafts; confidences as a draft model has them: most near 1, some near 0."""
    g = torch.Generator().manual_seed(case.batch)
    shape = case.batch, case.draft
    ids = torch.randint(0, 128256, shape, generator=g)
    lengths = torch.randint(case.draft // 2, case.draft + 1, (case.batch, 1), generator=g)
    ids = torch.where(torch.arange(case.draft) < lengths, ids, -1)
    confidence = torch.rand(shape, generator=g) ** 0.4
    n = torch.arange(case.budget + 1) / 500
    cost = (1 + n + n * n).to(DEVICE) if case.has_cost else None
    return [Drafted(ids.to(DEVICE), confidence.to(DEVICE), cost)]


def ours(case: BudgetCase, x: Drafted, backend: str) -> DraftAllocation:
    """One call of the package."""
    return allocate_drafts(x.draft_ids, x.confidence, budget=case.budget, cost=x.cost, backend=backend)


def minimum(case: BudgetCase, x: Drafted, result: DraftAllocation) -> int:
    """Bytes of drafts and confidences, of the results, and of the costs up to the number that was chosen."""
    kept = int(result.num_draft.sum())
    return moved(x.draft_ids, x.confidence, *result) + (0 if x.cost is None else 4 * (kept + 2))


def near(case: BudgetCase, backend: str) -> int:
    """Products and ranks, which lie in the nearest cache: each block that ranks reads every product."""
    drafts, block = case.batch * case.draft, 64 if backend == "triton" else 256
    return 4 * drafts * -(-drafts // block) + 4 * (5 * drafts + 4 * case.budget) + 12 * drafts


def plain(case: BudgetCase, x: Drafted) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, cu_draft, source) in PyTorch."""
    product = torch.where(x.draft_ids >= 0, x.confidence, 0.0).cumprod(1)
    best, order = product.flatten().sort(descending=True)
    best, order = best[: case.budget], order[: case.budget]
    if x.cost is not None:
        gained = torch.cat([best.new_zeros(1), best.cumsum(0)]) + case.batch
        order = order[: int((gained / x.cost[: len(gained)]).argmax())]
    kept = torch.zeros(product.numel(), dtype=torch.bool, device=product.device)
    kept[order] = True
    counts = kept.view(product.shape).sum(1, dtype=torch.int32)
    cu_draft = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    source = kept.nonzero()[:, 0]
    return x.draft_ids.flatten()[source], cu_draft, source


def check_rival(case: BudgetCase, run: Run, x: Drafted) -> None:
    """The drafts that the reference keeps; its results are padded."""
    ids, cu_draft, source = run(x)
    want = ours(case, x, "reference")
    kept = len(ids)
    assert torch.equal(cu_draft, want.cu_draft), "other numbers of drafts"
    assert torch.equal(ids, want.draft_ids[:kept]) and torch.equal(source.int(), want.source[:kept]), "other drafts"


def rivals(case: BudgetCase, made: Sequence[Drafted]) -> dict[str, Run]:
    """One."""
    return {"sort and mask": lambda x: plain(case, x)}
