"""tree_mask with tree_layout beside Medusa's Python, which makes both at once; and masks over a long past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdec_kernels import TreeMask, tree_layout, tree_mask

from .minimum import moved
from .rivals._sglang_tree import with_drafted
from .suite import Run, rivals_for
from .trees import MAX_DEPTH, Shape, TreeCase, loads, medusa_buffers, shape_cases, varied_shapes

PAST = 2048
# An element of a mask is made of words that its block finds in the nearest cache, a few KiB a request; no meter sees
# caches. So many bytes may an element of [query, key] read there: its word of ancestors and, where each element is
# looked at by itself (in CUDA 16 bytes of the mask together), the depth and the past; in a flat mask also the search
# for its request.
NEAR = {
    "triton": {"layout": 4, "bool": 0.15, "additive": 0.15, "flat": 0.3, "flat_packed": 0.3, "int32": 0.125},
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


QUICK = 1
CASES = [
    *(MaskCase(**vars(case)) for case in shape_cases("tree_mask")),
    *(
        MaskCase("tree_mask", format=f"{kind}, past {PAST}")
        for kind in ("bool", "additive bf16", "flat", "flat_packed")
    ),
    MaskCase("tree_mask", 64, 64, format="int32"),
]
inputs = varied_shapes


def kind(case: MaskCase) -> str:
    """The format's first word: its name, or "layout"."""
    return case.format.replace(",", "").split()[0]


def ours(case: MaskCase, x: Shape, backend: str) -> TreeMask:
    """One call of the package, or the two that give what Medusa's Python gives."""
    if case.format == "layout and bool":
        tree_layout(x.parents, max_depth=MAX_DEPTH, backend=backend)
        return tree_mask(x.parents, backend=backend)
    named = {"dtype": torch.bfloat16} if kind(case) == "additive" else {}
    return tree_mask(x.parents, format=kind(case), past=case.past or None, backend=backend, **named)


def minimum(case: MaskCase, x: Shape, result: TreeMask) -> int:
    """Bytes of the parents and of the results; where a layout is made too, its own."""
    layout = tree_layout(x.parents, max_depth=MAX_DEPTH) if case.format == "layout and bool" else ()
    return moved(x.parents, *layout, *result)


def near(case: MaskCase, backend: str) -> int:
    """Bytes that elements may read again, that blocks load of the tree, and of its bits and depths, written between."""
    elements = case.batch * case.nodes * (case.past + case.nodes)
    of_tree = loads(case) * (2 if kind(case) == "layout" else 1)
    bits = 4 * case.batch * case.nodes * (1 + -(-case.nodes // 32))
    return int(NEAR[backend][kind(case)] * elements) + of_tree + bits


def medusa(x: Shape) -> list[Tensor]:
    """A request at a time."""
    return [medusa_buffers(choices)[0] for choices in x.choices]


def dense(case: MaskCase, x: Shape) -> tuple[Tensor]:
    """A dense mask as transformers' callers write it: Medusa's square beside ones for the past."""
    square = torch.stack(medusa(x))[:, None].to(x.parents.device)
    whole = torch.nn.functional.pad(square, (PAST, 0), value=True)
    if case.format.startswith("bool"):
        return (whole,)
    zero = torch.zeros((), dtype=torch.bfloat16, device=whole.device)
    return (torch.where(whole, zero, torch.finfo(torch.bfloat16).min),)


def check(case: MaskCase, run: Run, x: Shape) -> None:
    """The mask of the reference, in whatever shape; it is the first result, or in parts by request."""
    got, want = run(x), ours(case, x, "reference").mask
    mask = torch.stack(got) if isinstance(got, list) else got[0]
    assert torch.equal(mask.flatten().to(want.device), want.flatten())


def rivals(case: MaskCase, made: Sequence[Shape]) -> dict[str, Run]:
    """Those that have the format."""
    found: dict[str, Run] = {}
    if case.format == "layout and bool":
        found["Medusa's Python"] = medusa
    elif case.format.startswith(("bool", "additive")):
        found["Medusa's Python"] = partial(dense, case)
    return found | {rival.NAME: with_drafted(rival, made, case.past) for rival in rivals_for(case, "kernels")}
