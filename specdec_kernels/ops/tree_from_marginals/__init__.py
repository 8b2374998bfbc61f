"""The likeliest tree of drafts whose positions are predicted at once, as by Medusa, DFlash and P-EAGLE."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._check import ID_DTYPES, MAX_NODES, Checker, fail
from ..._codes import Backend
from ..._op import Op, Shape
from ..._types import CandidateTree
from . import reference

MAX_CANDIDATES = 2048  # of a request: sorted in one block's shared memory


def _shapes(
    candidate_ids: Tensor, logprobs: Tensor, num_nodes: int, root_ids: Tensor | None, max_nodes: Tensor | None
) -> tuple[Shape, ...]:
    batch, shape = candidate_ids.shape[:1], (candidate_ids.shape[0], num_nodes)
    return (shape, candidate_ids.dtype), (shape, torch.int32), (shape, torch.int32), (batch, torch.int32)


op = Op(reference.tree_from_marginals, _shapes, results=CandidateTree._fields)


def tree_from_marginals(
    candidate_ids: Tensor,
    logprobs: Tensor,
    *,
    num_nodes: int,
    root_ids: Tensor | None = None,
    max_nodes: Tensor | None = None,
    out: CandidateTree | None = None,
    backend: Backend | None = None,
) -> CandidateTree:
    """The root and the ``num_nodes - 1`` likeliest prefixes, where positions are independent: exact, on the device.

    A prefix (x_1 .. x_d) has score ``logprobs[0, x_1] + ... + logprobs[d - 1, x_d]``, summed in float32 in this order.
    Nodes come by falling score, equal ones by their parent's order, then by rank at their position (the higher
    log-probability, then the smaller index). So parents come before their children, siblings by falling probability,
    and the first n nodes are the best tree of n. Only for rules whose candidates are deterministic (``match``,
    ``greedy``, ``typical``, ``target_only``, ``recursive`` without draft logits).

    Args:
        candidate_ids: int32 or int64 ``[batch, depth, width]``, candidates of each position in any order; -1 is none.
            Of equal ids at a position the likeliest counts. At most 2048 a request (``depth * width``).
        logprobs: float32 ``[batch, depth, width]``, log q of each. -inf is no candidate; above 0, where rounding may
            leave it, is 0.
        num_nodes: nodes of the result, the root included, a host int, at most 1024.
        root_ids: int32 or int64 ``[batch]``, the last committed tokens: ids of node 0, by default -1.
        max_nodes: int32 ``[batch]``, a limit below `num_nodes` for each request. Of a request with less than 2
            candidates are not read.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        CandidateTree, padded with -1 where there are no more prefixes; source is ``position * width + index``. Status
        2: a log-probability that is NaN, no candidate then, or above 1. Status 4: an id below -1 or above 2^31 - 1, no
        candidate.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import tree_from_marginals
        >>> ids = torch.tensor([[[4, 5], [6, 7]]])  # two positions, two candidates each
        >>> tree = tree_from_marginals(ids, torch.tensor([[[0.6, 0.3], [0.9, 0.1]]]).log(), num_nodes=4)
        >>> tree.token_ids, tree.parents
        (tensor([[-1,  4,  6,  5]]), tensor([[-1,  0,  1,  0]], dtype=torch.int32))
    """
    name = "tree_from_marginals"
    check = Checker.of(name, "candidate_ids", candidate_ids, "of int32 or int64")
    check.dense("candidate_ids", candidate_ids, ID_DTYPES, ("batch", "depth", "width"))
    batch, depth, width = candidate_ids.shape
    if depth * width > MAX_CANDIDATES:
        fail(name, "candidate_ids", f"at most {MAX_CANDIDATES} a request", f"{depth} * {width}")
    check.dense("logprobs", logprobs, (torch.float32,), (batch, depth, width))
    if check.size("num_nodes", num_nodes, 1) > MAX_NODES:
        fail(name, "num_nodes", f"at most {MAX_NODES}", num_nodes)
    if root_ids is not None:
        check.vector("root_ids", root_ids, ID_DTYPES, batch)
    if max_nodes is not None:
        check.vector("max_nodes", max_nodes, (torch.int32,), batch)
    given = (candidate_ids, logprobs, num_nodes, root_ids, max_nodes)
    return CandidateTree(*op(*given, device=candidate_ids.device, backend=backend, out=out))
