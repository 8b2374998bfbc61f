"""tree_layout beside Medusa's Python: depths, positions, links, ancestor bits and leaf paths of varied trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_kernels import TreeLayout, tree_layout, tree_links

from . import trees
from .minimum import moved
from .rivals._sglang_tree import with_drafted
from .suite import Contender, pytest_speed, rivals_for
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


def minimum(case: TreeCase, x: Shape, result: TreeLayout) -> int:
    """Bytes of the parents and of every result."""
    return moved(x.parents, *result)


def near(case: TreeCase, backend: str) -> int:
    """Bytes that blocks load of the tree."""
    return trees.loads(case)


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


def check_links(run: Callable[[Shape], tuple[Tensor, Tensor, Tensor]]) -> Callable[[Shape], None]:
    """Positions and SGLang's links of the reference."""

    def check(x: Shape) -> None:
        _, positions, links = run(x)
        assert torch.equal(positions, ours(x, "reference").positions.flatten())
        assert torch.equal(links, torch.stack(tree_links(x.parents, engine="sglang")))

    return check


def check_ours(backend: str) -> Callable[[Shape], None]:
    """Every field of the reference."""

    def check(x: Shape) -> None:
        for name, have, want in zip(TreeLayout._fields, ours(x, backend), ours(x, "reference"), strict=True):
            assert torch.equal(have, want), f"{backend}: {name} differs"

    return check


def contenders(case: TreeCase, made: Sequence[Shape], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rival."""
    field = [Contender(b, True, lambda x, b=b: ours(x, b), check_ours(b)) for b in backends]
    field.append(Contender("Medusa's Python", False, medusa, check_medusa))
    for rival in rivals_for(case, "build_tree"):
        run = with_drafted(rival, made)
        field.append(Contender(rival.NAME, False, run, check_links(run)))
    return field


test_speed = pytest_speed("tree_layout")
