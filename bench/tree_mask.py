"""tree_mask with tree_layout beside Medusa's Python, which makes both at once; and masks over a long past."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_kernels import TreeMask, tree_layout, tree_mask

from . import trees
from .suite import Contender, pytest_speed
from .trees import MAX_DEPTH, Shape, TreeCase, medusa_buffers

PAST = 2048


@dataclass(frozen=True)
class MaskCase(TreeCase):
    """What is made of the trees."""

    format: str = "layout and bool"

    @property
    def words(self) -> str:
        """Format and sizes."""
        return f"{self.format}, {super().words}"


def cases(extent: str) -> list[MaskCase]:
    """Cases of `quick`, `default` or `full`."""
    shapes = [MaskCase(**vars(case)) for case in trees.cases("tree_mask", extent)]
    if extent == "quick":
        return shapes
    long = [
        MaskCase("tree_mask", format=f"{kind}, past {PAST}")
        for kind in ("bool", "additive bf16", "flat", "flat_packed")
    ]
    return [*shapes, *long, MaskCase("tree_mask", 64, 64, format="int32")]


def inputs(case: MaskCase) -> list[Shape]:
    """Two batches."""
    made = [trees.shape(case.nodes, case.batch, varied=True, seed=seed) for seed in range(2)]
    return [x._replace(parents=x.parents.cuda()) for x in made] if torch.cuda.is_available() else made


def ours(case: MaskCase, x: Shape, backend: str) -> TreeMask:
    """One call of the package, or the two that give what Medusa's Python gives."""
    format, _, past = case.format.partition(", past ")
    if case.format == "layout and bool":
        tree_layout(x.parents, max_depth=MAX_DEPTH, backend=backend)
        return tree_mask(x.parents, backend=backend)
    kind = format.split()[0]
    return tree_mask(
        x.parents, format=kind, past=int(past) if past else None, dtype=torch.bfloat16, backend=backend
    )  # fmt: skip


def medusa(x: Shape) -> list[Tensor]:
    """A request at a time."""
    return [medusa_buffers(choices)[0] for choices in x.choices]


def dense(case: MaskCase, x: Shape) -> Tensor:
    """A dense mask as transformers' callers write it: Medusa's square beside ones for the past."""
    square = torch.stack(medusa(x))[:, None].to(x.parents.device)
    whole = torch.nn.functional.pad(square, (PAST, 0), value=True)
    if case.format.startswith("bool"):
        return whole
    zero = torch.zeros((), dtype=torch.bfloat16, device=whole.device)
    return torch.where(whole, zero, torch.finfo(torch.bfloat16).min)


def check_ours(case: MaskCase, backend: str) -> Callable[[Shape], None]:
    """The reference's mask."""

    def check(x: Shape) -> None:
        assert torch.equal(ours(case, x, backend).mask, ours(case, x, "reference").mask)

    return check


def contenders(case: MaskCase, made: Sequence[Shape], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rival where it has the format."""

    def check_square(x: Shape) -> None:
        assert torch.equal(torch.stack(medusa(x)), ours(case, x, "reference").mask[:, 0].cpu())

    def check_dense(x: Shape) -> None:
        assert torch.equal(dense(case, x), ours(case, x, "reference").mask)

    field = [Contender(b, True, lambda x, b=b: ours(case, x, b), check_ours(case, b)) for b in backends]
    if case.format == "layout and bool":
        field.append(Contender("Medusa's Python", False, medusa, check_square))
    if case.format.startswith(("bool", "additive")):
        field.append(Contender("Medusa's Python", False, lambda x: dense(case, x), check_dense))
    return field


test_speed = pytest_speed("tree_mask")
