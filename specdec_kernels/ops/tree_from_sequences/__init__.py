"""A tree of candidates from many token sequences: n-grams, retrieval, lookahead, or one draft as a chain."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._check import ID_DTYPES, MAX_NODES, Checker, fail
from ..._codes import Backend
from ..._op import Op, Shape
from ..._types import CandidateTree
from . import reference


def _shapes(token_ids: Tensor, num_nodes: int) -> tuple[Shape, ...]:
    batch, shape = token_ids.shape[:1], (token_ids.shape[0], num_nodes)
    return (shape, token_ids.dtype), (shape, torch.int32), (shape, torch.int32), (batch, torch.int32)


op = Op(reference.tree_from_sequences, _shapes, results=CandidateTree._fields)


def tree_from_sequences(
    token_ids: Tensor, *, num_nodes: int | None = None, out: CandidateTree | None = None, backend: Backend | None = None
) -> CandidateTree:
    """Merge candidate continuations into a trie: sequences with a common prefix share its nodes.

    A node is a distinct prefix, kept for the first sequence that has it; nodes in the order (sequence, place).

    Args:
        token_ids: int32 or int64 ``[batch, sequences, length]``; a sequence ends at its first -1.
        num_nodes: nodes of the result, the root included; by default ``1 + sequences * length``, at most 1024. Later
            nodes are cut, which deterministic candidates allow.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        CandidateTree; source is ``sequence * length + place``. Status 4: an id below -1, where its sequence ends.

    Raises:
        ValueError: wrong shapes or dtypes.

    Example:
        >>> import torch
        >>> from specdec_kernels import tree_from_sequences
        >>> tree = tree_from_sequences(torch.tensor([[[5, 6], [5, 7], [8, -1]]]))
        >>> tree.token_ids, tree.parents
        (tensor([[-1,  5,  6,  7,  8, -1, -1]]), tensor([[-1,  0,  1,  1,  0, -1, -1]], dtype=torch.int32))
    """
    name = "tree_from_sequences"
    check = Checker.of(name, "token_ids", token_ids, "of int32 or int64")
    check.dense("token_ids", token_ids, ID_DTYPES, ("batch", "sequences", "length"))
    if num_nodes is None:
        num_nodes = min(1 + token_ids.shape[1] * token_ids.shape[2], MAX_NODES)
    if check.size("num_nodes", num_nodes, 1) > MAX_NODES:
        fail(name, "num_nodes", f"at most {MAX_NODES}", num_nodes)
    return CandidateTree(*op(token_ids, num_nodes, device=token_ids.device, backend=backend, out=out))
