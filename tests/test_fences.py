"""Every tensor of a call ends where memory ends: a read or write behind it is a crash."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch
from cases import RULES
from edit_cases import make_edits
from op_calls import CALLS, VOCAB, numbers
from test_active import CALLS as ROW_CALLS
from test_active import Call, chain, tree
from test_calls import tensors
from torch import Tensor
from tree_cases import TREE_RULES

import specdec_kernels
from specdec_kernels import CacheLayout
from specdec_kernels._op import OPS

DRAFT_VOCAB = 23
_libc = ctypes.CDLL(None, use_errno=True)


def fenced(value: Any, keeps: list[mmap.mmap]) -> Any:
    """A copy whose tensors each end at the end of a page, behind which nothing can be read or written."""
    if isinstance(value, CacheLayout):
        return CacheLayout([fenced(t, keeps) for t in value.tensors], "blhd")  # of a layout: [batch, slot, head, byte]
    if isinstance(value, dict):
        return {name: fenced(v, keeps) for name, v in value.items()}
    if isinstance(value, tuple):
        parts = [fenced(v, keeps) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not isinstance(value, Tensor) or value.numel() == 0:
        return value
    size = -(-value.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    keeps.append(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    assert _libc.mprotect(ctypes.c_void_p(whole.data_ptr() + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return whole[size - value.nbytes : size].view(value.dtype).view(value.shape).copy_(value)


def of_fewer_ids(call: Call) -> Call:
    """The draft rows hold every second id or so, in an order of their own."""
    op, given = call
    token_map = torch.randperm(VOCAB, generator=numbers(5))[:DRAFT_VOCAB].int()
    given["draft_logits"] = given["draft_logits"][..., token_map.long()].contiguous()
    return op, {**given, "token_map": token_map}


def restricted(call: Call) -> Call:
    """With edits, a mask and the likeliest ids."""
    op, given = call
    batch, rows = given["target_logits"].shape[:2]
    allowed = torch.randint(-(2**31), 2**31, (batch * rows, -(-VOCAB // 32)), generator=numbers(6), dtype=torch.int32)
    edits = make_edits(batch, VOCAB)
    return op, {**given, "allowed": allowed, "edits": edits, "draft_edits": edits, "top": 3}


def of_op(name: str) -> Call:
    args, named = CALLS[name](1)
    op = getattr(specdec_kernels, name)
    return lambda *, args, **named: op(*args, **named), {"args": args, **named}


FENCED = {
    **{name: lambda name=name: of_op(name) for name in CALLS},  # type: ignore[misc]
    **ROW_CALLS,
    **{f"chain {rule}, fewer ids": lambda rule=rule: of_fewer_ids(chain(rule)) for rule in RULES},  # type: ignore[misc]
    **{f"tree {rule}, fewer ids": lambda rule=rule: of_fewer_ids(tree(rule)) for rule in TREE_RULES},  # type: ignore[misc]
    **{f"chain {rule}, edits": lambda rule=rule: restricted(chain(rule)) for rule in RULES},  # type: ignore[misc]
    **{f"tree {rule}, edits": lambda rule=rule: restricted(tree(rule)) for rule in TREE_RULES},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", FENCED)
def test_a_call_reads_and_writes_nothing_behind_its_tensors(name: str, backend: str, device: str) -> None:
    if device != "cpu":
        pytest.skip("memory of a GPU has no fences; compute-sanitizer looks there")
    if name in OPS and backend.removesuffix("_host") not in ("reference", *OPS[name].backends):
        pytest.skip(f"{name} has no such backend")
    op, given = FENCED[name]()
    want = op(**given)
    _, given = FENCED[name]()  # what is written in place is new again
    keeps: list[mmap.mmap] = []
    got = op(**fenced(given, keeps), out=fenced(want, keeps))
    torch.testing.assert_close(tensors(got), tensors(want), rtol=0, atol=0, equal_nan=True)
