"""select_tree in Triton: one launch, one sort a tree."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton.codes import S_LAYOUT
from ..._triton.rows import key_of
from ..._triton.trees import Candidates, at_nodes, padded, put_candidate, put_none, smaller, tree_of, with_ancestors


@triton.jit
def _select_kernel(token_ids, parents, scores, out, candidates, num_nodes, NP: tl.constexpr):
    """The num_nodes best by score[n] = min(score[n], score[parents[n]]), ties to the smaller index.

    A child never comes before its parent in that order, so what is kept is connected. Grid: batch.
    """
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    parent, _, bad = tree_of(parents, b, candidates, candidates, NP)
    at = b * candidates + n
    token = tl.load(token_ids + at, mask=n < candidates, other=-1)
    score = tl.load(scores + at, mask=n < candidates, other=float("-inf")).to(tl.float32)
    score = tl.where((parent >= 0) & (token >= 0) & (score == score), score, float("-inf"))
    score = with_ancestors(tl.where(n == 0, float("inf"), score), parent, candidates, smaller, NP)

    order = (~key_of(score)).to(tl.int64) * NP + n  # ascending: the best first
    last = tl.gather(tl.sort(order), n * 0 + tl.minimum(num_nodes, NP) - 1, 0)
    chosen = (order <= last) & (score > float("-inf"))
    upto = tl.cumsum(chosen.to(tl.int32), axis=0)
    number = tl.where(parent >= 0, at_nodes(upto, parent), 0) - 1
    put_candidate(out, b * num_nodes + upto - 1, token, number, n, chosen)
    put_none(out, b, tl.max(upto, axis=0), num_nodes, num_nodes, NP)
    tl.store(out.status + b, tl.where(bad, S_LAYOUT, 0))


def select_tree_out(
    token_ids: Tensor, parents: Tensor, scores: Tensor, num_nodes: int,
    out_token_ids: Tensor, out_parents: Tensor, source: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.select_tree`."""
    batch, candidates = parents.shape
    out = Candidates(out_token_ids, out_parents, source, status)
    host.launch(
        _select_kernel, batch, token_ids, parents, scores, out, candidates, num_nodes, NP=padded(candidates)
    )  # fmt: skip
