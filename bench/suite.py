"""Shared by `bench/<op>.py`: contenders of a case, and the check of each before the clock.

The file of an op has `CASES`, of which the first `QUICK` are the main ones, and functions:

* `inputs(case)`: several, which the calls of a case walk through;
* `ours(case, x, backend)`: one call of the package; `variants(case, backend)`: several calls by name, if there are;
* `rivals(case, made)`: calls of the others by name; `made` are the inputs, for what is prepared before the clock;
* `check(case, run, x)`, and `check_rival` where rivals have another: raises AssertionError where a result differs from
  the reference; without it the tensors must be equal;
* of an op on trees or caches, `minimum(case, x, result)`: bytes that a call must move.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels
from specdec_kernels import Sampling

from .cases import DEVICE, FILTERS, Case, OpCase
from .rivals import rivals
from .rows import DTYPES, ChainInput, chains

OPS = (
    "verify_chain", "sample", "token_logprobs", "acceptance_ratios", "residual_probs", "residual_sample",
    "allocate_drafts", "edit_rows", "count_tokens", "compact_cache", "rollback", "gather_nodes", "select_state",
    "advance_state", "advance_window", "verify_tree", "tree_layout", "tree_mask", "select_tree", "tree_from_sequences",
    "tree_from_marginals", "tree_attention", "tree_cache", "linear",
)  # fmt: skip
CHECKED_REQUESTS = 4  # a row is checked against the (slow) reference on so many requests
Run = Callable[[Any], Any]  # takes one input of a case


class Contender(NamedTuple):
    """Somebody who runs in a case."""

    name: str
    is_ours: bool
    run: Run
    check: Callable[[Any], None]  # raises AssertionError where it differs from the reference


def module(op: str) -> ModuleType:
    """bench/<op>.py."""
    return importlib.import_module(f"bench.{op}")


def backends(wanted: Sequence[str] = ()) -> list[str]:
    """Ours that are timed here: the wanted ones, else every compiled one that runs."""
    reasons = specdec_kernels.available_backends()
    for name in wanted:
        if reasons.get(name, "no such backend") is not None:
            raise SystemExit(f"bench: backend {name} cannot run: {reasons.get(name, 'no such backend')}")
    natural = ("cuda", "triton") if DEVICE == "cuda" else ("cpu",)
    return list(wanted) or [b for b in natural if reasons[b] is None] or ["reference"]


def contenders(case: OpCase, made: Sequence[Any], backends: Sequence[str]) -> list[Contender]:
    """Ours on each backend, then the rivals."""
    bench = module(case.op)
    check = getattr(bench, "check", check_equal)
    check_rival = getattr(bench, "check_rival", check)
    field = []
    for backend in backends:
        field += [
            Contender(name, True, run, partial(check, case, run)) for name, run in variants(case, backend).items()
        ]
    for name, run in bench.rivals(case, made).items():
        field.append(Contender(name, False, run, partial(check_rival, case, run)))
    return field


def ours(case: OpCase, backend: str) -> Run:
    """The package's call, for one input."""
    return partial(module(case.op).ours, case, backend=backend)


def variants(case: OpCase, backend: str) -> dict[str, Run]:
    """All that is timed of a backend, by name."""
    bench = module(case.op)
    return bench.variants(case, backend) if hasattr(bench, "variants") else {backend: ours(case, backend)}


def check_equal(case: OpCase, run: Run, x: Any) -> None:
    """The tensors of the reference; a rival may lack the last of them."""
    got, want = run(x), ours(case, "reference")(x)
    if isinstance(want, Tensor):
        got, want = (got,), (want,)
    for i, (have, expected) in enumerate(zip(got, want, strict=False)):
        assert torch.equal(have, expected), f"result {i} differs"


def chain_inputs(case: Case) -> list[ChainInput]:
    """Enough batches that a round trip leaves no row in a private cache, acceptance right as a whole."""
    count = {1: 8, 4: 4, 16: 2}.get(case.batch, 1)
    return chains(
        count, case.batch, case.draft, case.vocab,
        dtype=DTYPES[case.dtype], filters=FILTERS[case.filters], shape=case.rows, device=DEVICE,
    )  # fmt: skip


def row_inputs(case: Case) -> list[ChainInput]:
    """The same with one pair of rows a request: target and draft are ``[batch, vocab]``."""
    made = chain_inputs(Case(case.op, case.vocab, case.batch, 1, case.dtype, case.filters, rows=case.rows))
    return [x._replace(target=x.target[:, 0].contiguous(), draft=x.draft[:, 0].contiguous()) for x in made]


def sampling_for(rival: Any, x: ChainInput) -> Sampling:
    """Parameters of a case as a rival takes them."""
    made = x.sampling
    return made._replace(top_k=x.filters.top_k) if getattr(rival, "HAS_ONE_TOP_K", False) else made


def first_requests(x: ChainInput, count: int = CHECKED_REQUESTS) -> ChainInput:
    """The first requests of a batch, as views."""
    parts = [p[:count] if isinstance(p, Tensor) else p for p in x]
    parts[6] = specdec_kernels.RngKey(*(n if n is None else n[:count] for n in x.rng))
    return ChainInput(*parts)  # type: ignore[arg-type]


def rivals_for(case: OpCase, function: str) -> list[Any]:
    """Rivals that have the op, run here and take the case."""
    return [r for r in rivals() if hasattr(r, function) and r.available() is None and r.supports(case) is None]
