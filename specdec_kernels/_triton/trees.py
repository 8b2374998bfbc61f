"""Trees given by their parents, one tree a program: checked, followed by doubling, sorted; nothing loops over data.

Vectors hold one entry a node, padded to NP. A malformed tree is flagged and counts as its root alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import launch as host
from .codes import S_LAYOUT


class Candidates(NamedTuple):
    """Results, laid out as `CandidateTree`."""

    token_ids: Any
    parents: Any
    source: Any
    status: Any


def padded(nodes: int) -> int:
    """NP: what a vector of nodes is padded to; a histogram wants a bin a lane."""
    return max(host.power(nodes), 64)


@triton.jit
def any_of(conditions):
    return tl.max(conditions.to(tl.int32), axis=0) > 0


@triton.jit
def at_nodes(values, nodes):
    """Entries of a vector, 0 where a node is -1; the index may have another length."""
    return tl.where(nodes >= 0, tl.gather(values, tl.maximum(nodes, 0), 0), 0)


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def total(a, b):
    return a + b


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def with_ancestors(values, parent, nodes, combine: tl.constexpr, NP: tl.constexpr):
    """Each node's value combined with those of all its ancestors; a root's must be neutral or combine with itself."""
    n = tl.arange(0, NP)
    jump = tl.where(parent >= 0, parent, n)
    reach = 1
    while reach < nodes:
        values = combine(values, tl.gather(values, jump, 0))
        jump = tl.gather(jump, jump, 0)
        reach *= 2
    return values


@triton.jit
def tree_of(parents, b, nodes, max_depth, NP: tl.constexpr):
    """(parent, depth, bad) of request b: int32 [NP], -1 at padding; deeper than max_depth is malformed too."""
    n = tl.arange(0, NP)
    given = tl.load(parents + b * nodes + n, mask=n < nodes, other=-1).to(tl.int64)
    fits = (given >= -1) & (given < n)
    parent = tl.where(fits, given, -1).to(tl.int32)
    is_orphan = (parent > 0) & (tl.gather(parent, tl.maximum(parent, 0), 0) < 0)
    bad = any_of((fits == 0) | is_orphan)
    parent = tl.where(bad, -1, parent)

    depth = with_ancestors((parent >= 0).to(tl.int32), parent, nodes, total, NP)
    bad = bad | (tl.max(depth, axis=0) > max_depth)
    parent, depth = root_only(parent, depth, bad, NP)
    return parent, depth, bad


@triton.jit
def root_only(parent, depth, bad, NP: tl.constexpr):
    """(parent, depth) with padding marked; where bad is set nothing is left but the root."""
    n = tl.arange(0, NP)
    there = ((parent >= 0) & (bad == 0)) | (n == 0)
    return tl.where(bad, -1, parent), tl.where(there, tl.where(bad, 0, depth), -1)


@triton.jit
def ancestor_word(parent, w, nodes, NP: tl.constexpr):
    """Bits 32 w .. 32 w + 31 of every node's ancestors, its own included."""
    n = tl.arange(0, NP)
    return with_ancestors(tl.where(n >> 5 == w, 1 << (n & 31), 0), parent, nodes, either, NP)


@triton.jit
def children_of(parent, NP: tl.constexpr):
    """How many children each node has."""
    return tl.histogram(tl.maximum(parent, 0), NP, mask=parent >= 0)


@triton.jit
def neighbours(ordered, SIZE: tl.constexpr):
    """(entry before, entry after) each entry; those at the ends are their own."""
    i = tl.arange(0, SIZE)
    return (
        tl.gather(ordered, tl.maximum(i - 1, 0), 0),
        tl.gather(ordered, tl.minimum(i + 1, SIZE - 1), 0),
    )


@triton.jit
def bits_kernel(parents, depth_out, ancestors, status, nodes, words, NP: tl.constexpr):
    """Depths and packed ancestors. Grid: batch * words; a program owns one word of every node of a tree."""
    pid = tl.program_id(0).to(tl.int64)
    b = pid // words
    w = (pid % words).to(tl.int32)
    n = tl.arange(0, NP)
    parent, depth, bad = tree_of(parents, b, nodes, nodes, NP)
    tl.store(ancestors + (b * nodes + n) * words + w, ancestor_word(parent, w, nodes, NP), mask=n < nodes)
    if w == 0:
        tl.store(depth_out + b * nodes + n, depth, mask=n < nodes)
        tl.store(status + b, tl.where(bad, S_LAYOUT, 0))


@triton.jit
def put_candidate(out, at, token, parent, source, mask):
    tl.store(out.token_ids + at, token.to(out.token_ids.dtype.element_ty), mask=mask)
    tl.store(out.parents + at, parent, mask=mask)
    tl.store(out.source + at, source, mask=mask)


@triton.jit
def put_none(out, b, start, end, num_nodes, BLOCK: tl.constexpr):
    """Nodes from start to end are none."""
    for first in range(start, end, BLOCK):
        n = first + tl.arange(0, BLOCK)
        none = tl.full([BLOCK], -1, tl.int32)
        put_candidate(out, b * num_nodes + n, none, none, none, n < end)
