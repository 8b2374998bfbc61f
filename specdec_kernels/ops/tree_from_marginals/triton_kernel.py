"""tree_from_marginals in Triton: one launch, a program a request; each node costs one minimum over all nodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton.codes import S_DRAFT, S_ID
from ..._triton.rows import key_of, value_of
from ..._triton.trees import Candidates, any_of, put_candidate

_MAX_ID = tl.constexpr(2**31 - 1)


class _Marginals(NamedTuple):
    """The candidates of a batch, and what is noted about them."""

    token_ids: Any  # [batch, depth, width]
    logprobs: Any
    depth: Any
    width: Any
    ranked: Any  # int64 [batch, depth, width], see _rank


@triton.jit
def _order_of(score):
    """int64 that ascends as the score falls."""
    return (~key_of(score)).to(tl.int64)


@triton.jit
def _none():
    """The order of what is no candidate."""
    return _order_of(tl.full([], float("-inf"), tl.float32))


@triton.jit
def _rank(given, b, is_read, DP: tl.constexpr, WP: tl.constexpr):
    """Writes order * WP + index of each position's candidates, best first; returns the status bits."""
    d, w = tl.arange(0, DP)[:, None], tl.arange(0, WP)[None, :]
    inside = (d < given.depth) & (w < given.width)
    at = b * given.depth * given.width + d * given.width + w
    token = tl.load(given.token_ids + at, mask=inside & is_read, other=-1).to(tl.int64)
    logprob = tl.load(given.logprobs + at, mask=inside & is_read, other=0.0)
    is_token = (token >= 0) & (token <= _MAX_ID)
    has_bad_id = any_of(tl.max(((token != -1) & (is_token == 0)).to(tl.int32), axis=1))
    has_bad_logprob = any_of(tl.max((is_token & ((logprob <= 1.0) == 0)).to(tl.int32), axis=1))

    usable = is_token & (logprob > float("-inf"))  # NaN is not
    order = tl.where(usable, _order_of(tl.where(logprob > 0.0, 0.0, logprob)), _none()) * WP + w
    is_repeated = d + w < 0
    for k in range(0, given.width):
        other = tl.sum(tl.where(w == k, token, 0), axis=1)[:, None]
        before = tl.sum(tl.where(w == k, order, 0), axis=1)[:, None] < order
        is_repeated = is_repeated | ((token == other) & before)
    order = tl.sort(tl.where(is_repeated, _none() * WP + w, order), dim=1)
    tl.store(given.ranked + at, order, mask=inside)
    return tl.where(has_bad_id, S_ID, 0) | tl.where(has_bad_logprob, S_DRAFT, 0)


@triton.jit
def _logprob(given, b, place, there, WP: tl.constexpr):
    """Of the candidate at a place, -inf where there is none."""
    row = b * given.depth * given.width
    ranked = tl.load(given.ranked + row + place, mask=there, other=_none() * WP)
    return value_of((~(ranked // WP)).to(tl.int32))


@triton.jit
def _build_kernel(given, out, root_ids, max_nodes, num_nodes, DP: tl.constexpr, WP: tl.constexpr, NP: tl.constexpr):
    """Every node offers its best child that is none yet; the best offer becomes a node, ties to the first parent.

    Grid: batch. Vectors hold one entry a node.
    """
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    limit = tl.full([], 0, tl.int32) + num_nodes
    if max_nodes is not None:
        limit = tl.minimum(tl.load(max_nodes + b), num_nodes)
    status = _rank(given, b, limit > 1, DP, WP)
    tl.debug_barrier()  # every warp reads what all have sorted

    size = given.depth * given.width
    first = _logprob(given, b, 0, size > 0, WP)
    none = _none()
    offer = tl.where(n == 0, _order_of(first), none) * NP + n
    score = tl.zeros([NP], tl.float32)  # sum of the path
    place = n * 0  # of the next child: position * width + rank
    chosen, parents = n * 0, n * 0 - 1
    count = tl.full([], 1, tl.int32)
    best = tl.min(offer, axis=0)
    while (count < limit) & (best < none * NP):
        parent = (best & (NP - 1)).to(tl.int32)
        value = value_of((~((best - parent) // NP)).to(tl.int32))
        at = tl.sum(tl.where(n == parent, place, 0), axis=0)
        above = tl.sum(tl.where(n == parent, score, 0.0), axis=0)
        below = (at // given.width + 1) * given.width
        sibling = above + _logprob(given, b, at + 1, (at + 1) % given.width != 0, WP)
        child = value + _logprob(given, b, below, below < size, WP)
        is_new = n == count
        offer = tl.where(n == parent, _order_of(sibling) * NP + n, offer)
        offer = tl.where(is_new, _order_of(child) * NP + n, offer)
        place = tl.where(n == parent, at + 1, tl.where(is_new, below, place))
        score = tl.where(is_new, value, score)
        chosen, parents = tl.where(is_new, at, chosen), tl.where(is_new, parent, parents)
        count += 1
        best = tl.min(offer, axis=0)

    there = (n > 0) & (n < count)
    index = tl.load(given.ranked + b * size + chosen, mask=there, other=0) & (WP - 1)
    source = tl.where(there, chosen // tl.maximum(given.width, 1) * given.width + index.to(tl.int32), -1)
    token = tl.load(given.token_ids + b * size + source, mask=there, other=-1)
    if root_ids is not None:
        token = tl.where(n == 0, tl.load(root_ids + b).to(token.dtype), token)
    put_candidate(out, b * num_nodes + n, token, parents, source, n < num_nodes)
    tl.store(out.status + b, status)


def tree_from_marginals_out(
    candidate_ids: Tensor, logprobs: Tensor, num_nodes: int, root_ids: Tensor | None, max_nodes: Tensor | None,
    out_token_ids: Tensor, parents: Tensor, source: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.tree_from_marginals`."""
    batch, depth, width = candidate_ids.shape
    ranked = torch.empty(candidate_ids.shape, dtype=torch.int64, device=candidate_ids.device)
    given = _Marginals(candidate_ids, logprobs, depth, width, ranked)
    out = Candidates(out_token_ids, parents, source, status)
    sizes = {"DP": host.power(depth), "WP": max(host.power(width), 2), "NP": max(host.power(num_nodes), 2)}
    is_small = sizes["DP"] * sizes["WP"] <= 512 and sizes["NP"] <= 256
    num_warps = 1 if is_small else host.NUM_WARPS  # one warp has no barrier a node
    host.launch(_build_kernel, batch, given, out, root_ids, max_nodes, num_nodes, **sizes, num_warps=num_warps)
