"""Small calls of every op: those of the tests, every rule, and rows of several tiles that no alignment helps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels
from specdec_kernels import CacheLayout, use_backend

from .gpgpusim import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from attention_cases import make
from cases import RULES
from cases import make_chain as make_chain
from cases import make_rng as make_rng
from op_calls import CALLS, Call
from tree_cases import TREE_RULES, make_tree

TILES = 4099  # ids: two tiles, rows at odd addresses


class Case(NamedTuple):
    """A call; each time it is made, its tensors are new."""

    op: str
    name: str
    make: Callable[[], Call]


def _chain(rule: str, vocab: int = 41, **more: Any) -> Case:
    def call() -> Call:
        case = make_chain(2, 3, vocab, rule=rule, **more)
        return (case.draft_ids, case.target_logits, case.draft_logits), dict(case.keywords)

    return Case("verify_chain", " ".join([rule, *map(_word, more.values()), f"{vocab} ids"]), call)


def _tree(rule: str, vocab: int = 41, **more: Any) -> Case:
    def call() -> Call:
        case = make_tree(2, 6, vocab, rule=rule, **more)
        return case.tensors, dict(case.keywords)

    return Case("verify_tree", " ".join([rule, *map(_word, more.values()), f"{vocab} ids"]), call)


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _attention(**shape: Any) -> Case:
    def call() -> Call:
        case = make(**shape)
        ancestors = specdec_kernels.tree_layout(case.parents, max_depth=6, backend="reference").ancestors
        return (case.query, case.key, case.value, ancestors, case.lengths), case.keywords

    return Case("tree_attention", " ".join(map(_word, shape.values())), call)


BF16 = torch.bfloat16
CASES = [
    *(Case(op, "small", lambda op=op: CALLS[op](1)) for op in CALLS),  # type: ignore[misc]
    *(_chain(rule, dtype=BF16) for rule in RULES),
    _chain("ratio", TILES, dtype=BF16),
    _chain("ratio", TILES, filters="all"),
    _chain("match", filters="all", greedy_every=2),
    _chain("block", drafts="stats", ragged=True),
    *(_tree(rule, dtype=BF16) for rule in TREE_RULES),
    _tree("recursive", TILES),
    _tree("match", filters="all"),
    _attention(format="nhd", dtype=BF16, dims=(32, 32)),
    _attention(format="hnd", lengths=(70, 3), window=20),
]
# One a backend, whose kernels compile fast: the check of every push.
QUICK = {"triton": ("verify_chain", "greedy bfloat16 41 ids"), "cuda": ("sample", "small")}


def differences(case: Case, backend: str) -> list[str]:
    """How the results of a backend differ from those of `cpu`: ids must be equal, floats as near as tests ask."""
    found = {}
    for name in (backend, "cpu"):
        args, kwargs = case.make()
        with use_backend(name):
            results = getattr(specdec_kernels, case.op)(*args, **kwargs)
        found[name] = _tensors(results) + _tensors(args)  # caches are written in place
    faults = []
    for i, (ours, want) in enumerate(zip(*found.values(), strict=True)):
        try:
            close = {"rtol": 1e-5, "atol": 2e-5} if ours.dtype == torch.float32 else {"rtol": 0, "atol": 0}
            if ours.dtype in (torch.bfloat16, torch.float16):
                close = {"rtol": 2e-2, "atol": 2e-2}
            torch.testing.assert_close(ours, want, equal_nan=True, **close)
        except AssertionError as error:
            faults.append(f"tensor {i}: {' '.join(str(error).split())}")
    return faults


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, CacheLayout):
        return list(value.tensors)
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []
