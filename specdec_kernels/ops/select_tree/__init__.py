"""The best part of a tree of candidates: the rerank of EAGLE-2 and EAGLE-3."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._check import ID_DTYPES, LOGIT_DTYPES, SIZE_BITS, Checker
from ..._codes import Backend
from ..._op import Op, Shape
from ..._types import CandidateTree
from . import reference


def _shapes(token_ids: Tensor, parents: Tensor, scores: Tensor, num_nodes: int) -> tuple[Shape, ...]:
    batch, shape = token_ids.shape[:1], (token_ids.shape[0], num_nodes)
    return (shape, token_ids.dtype), (shape, torch.int32), (shape, torch.int32), (batch, torch.int32)


op = Op(reference.select_tree, _shapes, results=CandidateTree._fields)


def select_tree(
    token_ids: Tensor,
    parents: Tensor,
    scores: Tensor,
    *,
    num_nodes: int,
    out: CandidateTree | None = None,
    backend: Backend | None = None,
) -> CandidateTree:
    """Keep the root and the ``num_nodes - 1`` best candidates by cumulative log-probability, as a tree.

    A candidate counts ``min(its score, its parent's)``, so what is kept is connected and in topological order whatever
    the scores; ties go to the smaller index. Only for rules whose candidates are deterministic (``match``, ``greedy``,
    ``typical``, ``target_only``): a drawn candidate may never be dropped.

    Args:
        token_ids: int32 or int64 ``[batch, candidates]``, node 0 the root; -1 is no candidate.
        parents: int32 or int64 ``[batch, candidates]``, see `tree_layout`; at most 1024 candidates.
        scores: float32, bfloat16 or float16 ``[batch, candidates]``; NaN and -inf are never chosen, the root always
            is.
        num_nodes: nodes of the result, the root included, a host int.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        CandidateTree, padded with -1 where fewer can be chosen; source is the candidate's index. Status 32: malformed
        parents, only the root is kept.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import select_tree
        >>> ids, parents = torch.tensor([[9, 4, 5, 6, 7]]), torch.tensor([[-1, 0, 0, 1, 2]])
        >>> tree = select_tree(ids, parents, torch.tensor([[0.0, -0.1, -2.0, -0.5, -2.5]]), num_nodes=4)
        >>> tree.token_ids, tree.parents
        (tensor([[9, 4, 5, 6]]), tensor([[-1,  0,  0,  1]], dtype=torch.int32))
    """
    name = "select_tree"
    check = Checker.of(name, "parents", parents, "of int32 or int64")
    batch, candidates = check.parents(parents)
    check.dense("token_ids", token_ids, ID_DTYPES, (batch, candidates))
    check.dense("scores", scores, LOGIT_DTYPES, (batch, candidates))
    count = check.size("num_nodes", num_nodes, 1, SIZE_BITS)
    return CandidateTree(*op(token_ids, parents, scores, count, device=parents.device, backend=backend, out=out))
