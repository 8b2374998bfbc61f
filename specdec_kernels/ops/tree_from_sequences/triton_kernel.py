"""tree_from_sequences in Triton. A sequence shares its first tokens with one before it and owns the rest.

The own tokens are nodes, one below the other; the first hangs on the last shared one, which sequence `first` owns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton.codes import S_ID
from ..._triton.trees import Candidates, any_of, put_candidate, put_none

_BLOCK = tl.constexpr(128)  # tokens, or other sequences, that a program looks at at once


class _Sequences(NamedTuple):
    """The given ids, and what is found out about each sequence."""

    token_ids: Any  # [batch, count, width]
    count: Any
    width: Any
    length: Any  # int32 [batch, count] as are the next: tokens before the first that is none
    is_bad: Any  # an id is below -1
    shared: Any  # how many tokens an earlier sequence begins with, too
    first: Any  # the lowest one that does
    node: Any  # of the first token that is its own


@triton.jit
def _measure(given, row):
    """(tokens before the first that is none, whether an id is below -1)."""
    end, bad = row.to(tl.int32) * 0 + given.width, row < 0
    for start in range(0, given.width, _BLOCK):
        i = start + tl.arange(0, _BLOCK)
        token = tl.load(given.token_ids + row * given.width + i, mask=i < given.width, other=0)
        end = tl.minimum(end, tl.min(tl.where(token < 0, i, given.width), axis=0))
        bad = bad | any_of(token < -1)
    return end, bad


@triton.jit
def _share(given, b, mine, length):
    """(longest prefix that an earlier sequence has, too; the lowest one that has it)."""
    row = b * given.count
    shared, first = length * 0, length * 0
    for start in range(0, mine, _BLOCK):
        other = start + tl.arange(0, _BLOCK)
        same, equal = other < mine, tl.zeros([_BLOCK], tl.int32)
        i = length * 0
        while (i < length) & any_of(same):
            token = tl.load(given.token_ids + (row + mine) * given.width + i)
            same = same & (tl.load(given.token_ids + (row + other) * given.width + i, mask=same, other=-1) == token)
            equal += same.to(tl.int32)
            i += 1
        longest = tl.max(equal, axis=0)
        if longest > shared:
            shared = longest
            first = tl.min(tl.where(equal == longest, other, mine), axis=0)
    return shared, first


@triton.jit
def _found(table, row, s, mask):
    """What is known of sequences."""
    return tl.load(table + row + s, mask=mask, other=0)


@triton.jit
def _number(given, b, out, num_nodes):
    """Writes the nodes in the order (sequence, place); returns (how many they are, whether an id is bad)."""
    row = b * given.count
    filled, bad = tl.full([], 1, tl.int32), b < 0
    for start in range(0, given.count, _BLOCK):
        s = start + tl.arange(0, _BLOCK)
        there = s < given.count
        shared = _found(given.shared, row, s, there)
        own = _found(given.length, row, s, there) - shared
        node = filled + tl.cumsum(own, axis=0) - own
        filled += tl.sum(own, axis=0)
        bad = bad | any_of(_found(given.is_bad, row, s, there) > 0)
        tl.store(given.node + row + s, node, mask=there)
        tl.debug_barrier()
        branches = there & (shared > 0)
        first = _found(given.first, row, s, branches)
        last = _found(given.node, row, first, branches) + shared - 1 - _found(given.shared, row, first, branches)
        above = tl.where(branches, last, 0)
        own = tl.minimum(own, num_nodes - node)
        for i in range(0, tl.max(own, axis=0)):
            source = s * given.width + shared + i
            token = tl.load(given.token_ids + row * given.width + source, mask=i < own, other=-1)
            put_candidate(out, b * num_nodes + node + i, token, above, source, i < own)
            above = node + i
    return filled, bad


@triton.jit
def _sequences_kernel(given):
    """A node is a distinct prefix, kept for the first sequence that has it. Grid: batch * count, a sequence each."""
    row = tl.program_id(0).to(tl.int64)
    b, mine = row // given.count, (row % given.count).to(tl.int32)
    length, bad = _measure(given, row)
    shared, first = _share(given, b, mine, length)
    tl.store(given.length + row, length)
    tl.store(given.is_bad + row, bad.to(tl.int32))
    tl.store(given.shared + row, shared)
    tl.store(given.first + row, first)


@triton.jit
def _nodes_kernel(given, out, num_nodes):
    """Numbers and writes the nodes of a request. Grid: batch."""
    b = tl.program_id(0).to(tl.int64)
    filled, bad = _number(given, b, out, num_nodes)
    put_none(out, b, 0, 1, num_nodes, _BLOCK)  # the root has no token
    put_none(out, b, filled, num_nodes, num_nodes, _BLOCK)
    tl.store(out.status + b, tl.where(bad, S_ID, 0))


def tree_from_sequences_out(
    token_ids: Tensor, num_nodes: int, out_token_ids: Tensor, parents: Tensor, source: Tensor, status: Tensor
) -> None:
    """Write the results of `reference.tree_from_sequences`."""
    batch, sequences, length = token_ids.shape
    count = max(sequences, 1)
    found = (token_ids.new_empty((batch, count), dtype=torch.int32) for _ in range(5))
    given = _Sequences(token_ids, count, length if sequences else 0, *found)
    out = Candidates(out_token_ids, parents, source, status)
    host.launch(_sequences_kernel, batch * count, given, num_warps=1)
    host.launch(_nodes_kernel, batch, given, out, num_nodes, num_warps=1)
