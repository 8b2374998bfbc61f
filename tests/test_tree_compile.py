"""Tree operators are what their schemas say, and torch.compile takes a whole step of them as one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from check import assert_same
from torch import Tensor
from tree_cases import make_tree, random_parents

from specdec_kernels import Sampling, TreeResult, tree_layout, tree_mask, verify_tree
from specdec_kernels._op import OPS
from specdec_kernels.ops.verify_tree import op

NAMES = ("tree_layout", "tree_mask", "select_tree", "tree_from_sequences", "tree_from_marginals", op.name)
BATCH, NODES = 2, 9
VERIFIED = make_tree(BATCH, NODES, 33)


def arguments(name: str, device: str) -> tuple[Any, ...]:
    """Arguments that the public function passes to the operator."""
    parents = random_parents(BATCH, NODES, 4).to(device)
    ids = torch.arange(BATCH * NODES, device=device).view(BATCH, NODES)
    past = torch.tensor([3, 5], device=device)
    if name == "verify_tree":
        case = VERIFIED.to(device)
        distribution = tuple(Sampling.full(BATCH, temperature=0.8, device=device))
        rng = tuple(case.keywords["rng"])
        return (*case.tensors, 4, *distribution, *distribution, *rng, 3, False, *[None] * 10, 0.09, 0.3, None, None, 1)
    return {
        "tree_layout": (parents, past, 4, NODES),
        "tree_mask": (parents, past, None, 0, 20, 1, torch.bfloat16),
        "select_tree": (ids, parents, torch.randn(BATCH, NODES, device=device), 5),
        "tree_from_sequences": (ids.view(BATCH, 3, 3), 8),
        "tree_from_marginals": (ids.view(BATCH, 3, 3), torch.zeros(BATCH, 3, 3, device=device), 8, past, past.int()),
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(backend: str, device: str, name: str) -> None:
    if backend == "reference":
        return  # no operator: plain PyTorch
    tree_op, given = OPS[name], arguments(name, device)
    outs = tree_op(*given, device=torch.device(device), backend=backend)
    torch.library.opcheck(tree_op.overload(backend), given)
    torch.library.opcheck(tree_op.overload(backend, out=True), (*given, *outs))


def test_a_compiled_step_is_one_graph(backend: str, device: str) -> None:
    case = VERIFIED.to(device)

    def step(ids: Tensor, parents: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        result: TreeResult = verify_tree(ids, parents, target, **{**case.keywords, "rule": "match"})
        layout = tree_layout(parents, max_depth=4)
        return layout.positions, tree_mask(parents, past=7).mask, result.token_ids, result.path

    given = case.tensors[:3]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same(tuple(compiled(*given)), step(*given), ("positions", "mask", "token_ids", "path"))
