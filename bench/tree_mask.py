"""tree_mask with tree_layout beside Medusa's Python, which makes both at once; and masks over a long past."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_kernels import TreeMask, tree_layout, tree_mask

from . import trees
from .minimum import moved
from .rivals._sglang_tree import with_drafted
from .suite import Contender, pytest_speed, rivals_for
from .trees import MAX_DEPTH, Shape, TreeCase, medusa_buffers

PAST = 2048
# An element of a mask is made of words that its block finds in the nearest cache, a few KiB a request; no meter sees
# caches. So many bytes may an element of [query, key] read there: its word of ancestors and, where each element is
# looked at by itself (in CUDA 16 bytes of the mask together), the depth and the past; in a flat mask also the search
# for its request.
NEAR = {
    "triton": {"layout": 4, "bool": 0.15, "additive": 0.15, "flat": 4.4, "flat_packed": 4.3, "int32": 4.2},
    "cuda_host": {"layout": 0.6, "bool": 0.85, "additive": 1.6, "flat": 1.35, "flat_packed": 0.17, "int32": 0},
}


@dataclass(frozen=True)
class MaskCase(TreeCase):
    """The mask formats to build."""

    format: str = "layout and bool"

    @property
    def words(self) -> str:
        """Format and sizes."""
        return f"{self.format}, {super().words}"

    @property
    def past(self) -> int:
        """Cached tokens of each request."""
        return PAST if "past" in self.format else 0


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


def kind(case: MaskCase) -> str:
    """The format's first word: its name, or "layout"."""
    return case.format.replace(",", "").split()[0]


def ours(case: MaskCase, x: Shape, backend: str) -> TreeMask:
    """One call of the package, or the two that give what Medusa's Python gives."""
    if case.format == "layout and bool":
        tree_layout(x.parents, max_depth=MAX_DEPTH, backend=backend)
        return tree_mask(x.parents, backend=backend)
    return tree_mask(
        x.parents, format=kind(case), past=case.past or None, dtype=torch.bfloat16, backend=backend
    )  # fmt: skip


def minimum(case: MaskCase, x: Shape, result: TreeMask) -> int:
    """Bytes of the parents and of the results; where a layout is made too, its own."""
    layout = tree_layout(x.parents, max_depth=MAX_DEPTH) if case.format == "layout and bool" else ()
    return moved(x.parents, *layout, *result)


def near(case: MaskCase, backend: str) -> int:
    """Bytes that elements may read again, that blocks load of the tree, and of its bits and depths, written between."""
    elements = case.batch * case.nodes * (case.past + case.nodes)
    loads = trees.loads(case) * (2 if kind(case) == "layout" else 1)
    bits = 4 * case.batch * case.nodes * (1 + -(-case.nodes // 32))
    return int(NEAR[backend][kind(case)] * elements) + loads + bits


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

    def check_built(run: Callable[[Shape], tuple[Tensor, Tensor, Tensor]]) -> Callable[[Shape], None]:
        return lambda x: torch.testing.assert_close(run(x)[0], ours(case, x, "reference").mask.flatten())

    field = [Contender(b, True, lambda x, b=b: ours(case, x, b), check_ours(case, b)) for b in backends]
    if case.format == "layout and bool":
        field.append(Contender("Medusa's Python", False, medusa, check_square))
    if case.format.startswith(("bool", "additive")):
        field.append(Contender("Medusa's Python", False, lambda x: dense(case, x), check_dense))
    for rival in rivals_for(case, "build_tree"):
        build = with_drafted(rival, made, case.past)
        field.append(Contender(rival.NAME, False, build, check_built(build)))
    return field


test_speed = pytest_speed("tree_mask")
