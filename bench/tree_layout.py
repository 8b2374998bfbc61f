"""tree_layout beside Medusa's Python: depths, positions, links, ancestor bits and leaf paths of varied trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec_kernels import TreeLayout, tree_layout

from . import trees
from .suite import Contender, pytest_speed
from .trees import MAX_DEPTH, Shape, TreeCase, medusa_buffers


def cases(extent: str) -> list[TreeCase]:
    """Cases of `quick`, `default` or `full`."""
    return trees.cases("tree_layout", extent)


def inputs(case: TreeCase) -> list[Shape]:
    """Two batches."""
    made = [trees.shape(case.nodes, case.batch, varied=True, seed=seed) for seed in range(2)]
    return [x._replace(parents=x.parents.cuda()) for x in made] if torch.cuda.is_available() else made


def ours(x: Shape, backend: str) -> TreeLayout:
    """One call of the package."""
    return tree_layout(x.parents, max_depth=MAX_DEPTH, backend=backend)


def medusa(x: Shape) -> None:
    """A request at a time."""
    for choices in x.choices:
        medusa_buffers(choices)


def check_medusa(x: Shape) -> None:
    """Depths and leaf paths of the reference."""
    want = ours(x, "reference")
    for b, choices in enumerate(x.choices):
        _, depth, paths = medusa_buffers(choices)
        assert torch.equal(depth, want.depth[b].long().cpu())
        leaves, width = paths.shape
        assert torch.equal(paths, want.leaf_paths[b, :leaves, :width].long().cpu())


def check_ours(backend: str) -> Callable[[Shape], None]:
    """Every field of the reference."""

    def check(x: Shape) -> None:
        for name, have, want in zip(TreeLayout._fields, ours(x, backend), ours(x, "reference"), strict=True):
            assert torch.equal(have, want), f"{backend}: {name} differs"

    return check


def contenders(case: TreeCase, made: Sequence[Shape], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rival."""
    field = [Contender(b, True, lambda x, b=b: ours(x, b), check_ours(b)) for b in backends]
    return [*field, Contender("Medusa's Python", False, medusa, check_medusa)]


test_speed = pytest_speed("tree_layout")
