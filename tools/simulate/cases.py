"""Small calls of every op: those of the tests, every rule, and rows of several tiles that no alignment helps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels
from specdec_kernels import CacheLayout, MixedRules, edit_rows, use_backend

from .gpgpusim import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from attention_cases import make
from cases import RULES, ChainCase
from cases import make_chain as make_chain
from cases import make_rng as make_rng
from edit_cases import make_edits
from op_calls import CALLS, Call
from sparse_cases import sparse_chain, sparse_tree
from tree_cases import TREE_RULES, TreeCase, make_tree

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


def _with(case: Case, option: Callable[[Call], Call]) -> Case:
    return Case(case.op, f"{case.name} {option.__name__}", lambda: option(case.make()))


def edits(call: Call) -> Call:
    """Every edit, of requests; of rows where the op takes no other, and of draft rows too."""
    args, named = call
    rows = args[0] if len(args) == 1 else args[-2]
    made: Any = make_edits(len(rows), rows.shape[-1])
    if len(args) == 1:
        made = edit_rows(made, None, vocab=rows.shape[-1])
    elif args[-1] is not None:
        named = named | {"draft_edits": made}
    return args, named | {"edits": made}


def top(call: Call) -> Call:
    """The five likeliest ids of each emitted token."""
    return call[0], call[1] | {"logprobs": "processed", "top": 5}


def mixed(call: Call) -> Call:
    """The rule of the case for the last request, others for those before it."""
    args, named = call
    rules = ("greedy", "match", named["rule"])
    return args, named | {"rule": MixedRules(rules, torch.tensor([1, 0, 2][-len(args[0]) :], dtype=torch.int32))}


def kept(call: Call) -> Call:
    """Nine candidates in place of each draft row."""
    args, named = call
    rows = sparse_chain(ChainCase(*args, named), 9) if len(args) == 3 else sparse_tree(TreeCase(*args, named), 9)
    return (*args[:-1], rows), named


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
    *(_attention(format="nhd", dtype=BF16, dims=(32, 32), float8=f) for f in (torch.float8_e4m3fn, torch.float8_e5m2)),
    _with(Case("sample", "small", lambda: CALLS["sample"](1)), edits),
    *(_with(_chain(rule, dtype=BF16), edits) for rule in ("ratio", "match", "greedy", "block")),
    _with(_chain("ratio", TILES, filters="all"), edits),
    *(_with(_tree(rule, dtype=BF16), edits) for rule in ("match", "recursive", "typical", "traversal")),
    _with(_chain("match"), top),
    _with(_tree("match"), top),
    _with(_chain("ratio", dtype=BF16), mixed),
    _with(_tree("recursive", dtype=BF16), mixed),
    *(_with(_chain(rule, filters="temperature"), kept) for rule in ("ratio", "block")),
    *(_with(_tree(rule, filters="temperature"), kept) for rule in ("recursive", "greedy_multi_draft", "traversal")),
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
