"""tree_layout beside Medusa's Python: depths, positions, links, ancestor bits and leaf paths of varied trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_kernels import TreeLayout, tree_layout, tree_links

from .minimum import moved
from .rivals._sglang_tree import with_drafted
from .suite import Run, rivals_for
from .trees import MAX_DEPTH, Shape, TreeCase, loads, medusa_buffers, shape_cases, varied_shapes

QUICK = 1
CASES = shape_cases("tree_layout")
inputs = varied_shapes


def ours(case: TreeCase, x: Shape, backend: str) -> TreeLayout:
    """One call of the package."""
    return tree_layout(x.parents, max_depth=MAX_DEPTH, backend=backend)


def minimum(case: TreeCase, x: Shape, result: TreeLayout) -> int:
    """Bytes of the parents and of every result."""
    return moved(x.parents, *result)


def near(case: TreeCase, backend: str) -> int:
    """Bytes that blocks load of the tree."""
    return loads(case)


def medusa(x: Shape) -> None:
    """A request at a time."""
    for choices in x.choices:
        medusa_buffers(choices)


def check_rival(case: TreeCase, run: Run, x: Shape) -> None:
    """Depths and leaf paths of the reference; of SGLang its positions and links."""
    want = ours(case, x, "reference")
    if run is not medusa:
        _, positions, links = run(x)
        assert torch.equal(positions, want.positions.flatten())
        assert torch.equal(links, torch.stack(tree_links(x.parents, engine="sglang")))
        return
    for b, choices in enumerate(x.choices):
        _, depth, paths = medusa_buffers(choices)
        assert torch.equal(depth, want.depth[b].long().cpu())
        leaves, width = paths.shape
        assert torch.equal(paths, want.leaf_paths[b, :leaves, :width].long().cpu())


def rivals(case: TreeCase, made: Sequence[Shape]) -> dict[str, Run]:
    """Those that build trees."""
    return {"Medusa's Python": medusa} | {
        rival.NAME: with_drafted(rival, made) for rival in rivals_for(case, "kernels")
    }
