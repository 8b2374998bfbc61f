"""Requests that only pad a batch: `Sampling.active`. Nothing of them is read, and no other request sees them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import RULES, make_chain, make_rng, mixed_sampling
from check import assert_same
from op_calls import moved
from sparse_cases import sparse_chain, sparse_tree
from torch import Tensor
from tree_cases import TREE_RULES, make_tree

from specdec_kernels import (
    RngKey,
    Sampling,
    SparseRows,
    acceptance_ratios,
    residual_probs,
    residual_sample,
    sample,
    token_logprobs,
    verify_chain,
    verify_tree,
)

BATCH, VOCAB = 5, 41
ACTIVE = torch.tensor([True, False, True, True, False])
FILTERS = {"temperature": 0.8, "top_k": 9, "top_p": 0.9}
Call = tuple[Callable[..., Any], dict[str, Any]]
_libc = ctypes.CDLL(None, use_errno=True)


def chain(rule: str, **how: Any) -> Call:
    case = make_chain(BATCH, 3, VOCAB, rule=rule, ragged=True, **how)
    tensors = {"draft_ids": case.draft_ids, "target_logits": case.target_logits, "draft_logits": case.draft_logits}
    return verify_chain, {**tensors, **case.keywords, "logprobs": "processed"}


def tree(rule: str) -> Call:
    case = make_tree(BATCH, 7, VOCAB, rule=rule, filters="top_k" if rule == "match" else "none")
    names = ("token_ids", "parents", "target_logits", "draft_logits")
    return verify_tree, {**dict(zip(names, case.tensors, strict=True)), **case.keywords, "logprobs": "raw"}


def chain_of_candidates(rule: str) -> Call:
    case = make_chain(BATCH, 3, VOCAB, rule=rule, ragged=True, filters="temperature")
    rows = {"draft_ids": case.draft_ids, "target_logits": case.target_logits, "draft_logits": sparse_chain(case, 7)}
    return verify_chain, {**rows, **case.keywords}


def tree_of_candidates(rule: str) -> Call:
    case = make_tree(BATCH, 7, VOCAB, rule=rule, filters="temperature")
    rows = {"token_ids": case.token_ids, "parents": case.parents, "target_logits": case.target_logits}
    return verify_tree, {**rows, "draft_logits": sparse_tree(case, 12), **case.keywords}


def ratios(flat: bool) -> Call:
    _, given = chain("ratio", flat=flat)
    return acceptance_ratios, {name: given[name] for name in given if name not in ("rng", "rule", "logprobs")}


def sampled(**more: Any) -> Call:
    logits = torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(3))
    return sample, {
        "logits": logits, "sampling": mixed_sampling(BATCH, FILTERS), "rng": make_rng(BATCH), "purpose": "draft", **more
    }  # fmt: skip


def residual(op: Callable[..., Any], **more: Any) -> Call:
    g = torch.Generator().manual_seed(4)
    target, draft = (torch.randn(BATCH, VOCAB, generator=g) for _ in range(2))
    named = {"sampling": mixed_sampling(BATCH, FILTERS), "draft_sampling": mixed_sampling(BATCH, {})}
    return op, {"target_logits": target, "draft_logits": draft, **named, **more}


CALLS: dict[str, Callable[[], Call]] = {
    **{f"chain {rule}": lambda rule=rule: chain(rule) for rule in RULES},  # type: ignore[misc]
    "chain ratio filters": lambda: chain("ratio", filters="all", greedy_every=3),
    "chain ratio stats": lambda: chain("ratio", drafts="stats"),
    "chain block point": lambda: chain("block", drafts="point"),
    "chain ratio flat": lambda: chain("ratio", flat=True),
    **{f"chain {rule} candidates": lambda rule=rule: chain_of_candidates(rule) for rule in ("ratio", "block")},  # type: ignore[misc]
    **{f"tree {rule} candidates": lambda rule=rule: tree_of_candidates(rule) for rule in ("recursive", "traversal")},  # type: ignore[misc]
    **{f"tree {rule}": lambda rule=rule: tree(rule) for rule in TREE_RULES},  # type: ignore[misc]
    "ratios": lambda: ratios(False),
    "ratios flat": lambda: ratios(True),
    "sample": lambda: sampled(num_samples=3, exclude_ids=torch.arange(BATCH)[:, None]),
    "sample map": lambda: sampled(token_map=torch.arange(VOCAB).flip(0).int().contiguous()),
    "residual_probs": lambda: residual(residual_probs),
    "residual_sample": lambda: residual(residual_sample, rng=make_rng(BATCH)),
    "residual_sample point": lambda: residual(
        residual_sample, rng=make_rng(BATCH), draft_logits=None, draft_ids=torch.arange(BATCH), b=0.5
    ),
}


@pytest.fixture(autouse=True)
def scratch_holds_garbage() -> Iterator[None]:
    """Memory that nothing was written to: NaN, and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def unreadable(rows: Tensor, keeps: list[mmap.mmap]) -> Tensor:
    """Rows [batch, ...] in memory of which the pages of requests that are not active cannot be read."""
    page = -(-rows[0].nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, page * len(rows))
    keeps.append(memory)
    whole = torch.frombuffer(memory, dtype=rows.dtype)
    out = whole.as_strided(rows.shape, (page // rows.element_size(), *rows[0].stride()))
    out.copy_(rows)
    for b in (~ACTIVE).nonzero().flatten().tolist():
        assert _libc.mprotect(ctypes.c_void_p(whole.data_ptr() + b * page), ctypes.c_size_t(page), 0) == 0
    return out


def poisoned(name: str, value: Any, is_flat: bool) -> Any:
    """An argument whose entries of requests that are not active would do harm."""
    if isinstance(value, (Sampling, RngKey, SparseRows)):
        parts = value._asdict()
        return type(value)(**{field: poisoned(field, parts[field], False) for field in parts})
    if not isinstance(value, Tensor) or is_flat or len(value) != BATCH or name in ("token_map", "seed", "position"):
        return value
    idle = ~ACTIVE.view(-1, *[1] * (value.dim() - 1))
    return torch.where(idle, torch.nan, value) if value.is_floating_point() else torch.where(idle, 1 << 20, value)


@pytest.mark.parametrize("name", CALLS)
def test_a_request_that_is_not_active_is_not_read_and_changes_no_other(name: str, backend: str, device: str) -> None:
    op, given = CALLS[name]()
    want = op(**moved(given, device))
    is_flat = given.get("cu_draft") is not None
    given = {key: poisoned(key, value, is_flat) for key, value in given.items()}
    keeps: list[mmap.mmap] = []
    for rows in ("logits", "target_logits", "draft_logits"):
        if device == "cpu" and backend != "reference" and isinstance(given.get(rows), Tensor) and not is_flat:
            given[rows] = unreadable(torch.nan_to_num(given[rows]), keeps)
    for part in ("sampling", "draft_sampling"):
        if given.get(part) is not None:
            given[part] = given[part]._replace(active=ACTIVE)
    if device != "cpu":
        given = moved(given, device)
    got = op(**given)
    for field, ours, theirs in zip(got._fields, got, want, strict=True):
        if ours is None:
            assert theirs is None
            continue
        on = ACTIVE.to(device)
        assert_same((ours[on],), (theirs[on],), (field,))
        idle = -1 if field in ("token_ids", "path") else 0
        assert bool((ours[~on] == idle).all()), f"{field}: {ours[~on]}"


def test_a_bad_layout_of_a_request_that_is_not_active_is_not_flagged(backend: str, device: str) -> None:
    _, given = chain("match", flat=True)
    given = moved(given, device)
    cu = given["cu_draft"].clone()
    cu[-1] = 1 << 20  # the last request, which is not active
    sampling = given["sampling"]._replace(active=ACTIVE.to(device))
    got = verify_chain(**{**given, "cu_draft": cu, "sampling": sampling})
    assert got.status.tolist() == [0] * BATCH
    assert verify_chain(**{**given, "cu_draft": cu}).status[-1] == 32


def test_all_requests_may_be_inactive(backend: str, device: str) -> None:
    _, given = chain("ratio")
    given = moved(given, device)
    given["sampling"] = given["sampling"]._replace(active=torch.zeros(BATCH, dtype=torch.bool, device=device))
    got = verify_chain(**given)
    assert (got.token_ids == -1).all()
    assert not got.num_accepted.any()


def none_of(value: Any) -> Any:
    """An argument of no request."""
    if isinstance(value, (Sampling, RngKey, SparseRows)):
        return type(value)(*map(none_of, value))
    return value[:0] if isinstance(value, Tensor) and len(value) == BATCH else value


@pytest.mark.parametrize("name", [*(c for c in CALLS if "flat" not in c and "stats" not in c), "token_logprobs"])
def test_a_batch_may_be_empty(name: str, backend: str, device: str) -> None:
    op, given = CALLS.get(name, sampled)()
    if name == "token_logprobs":
        op, given = token_logprobs, {"logits": given["logits"], "sampling": given["sampling"], "top": 4}
        given |= {"token_ids": torch.arange(BATCH), "logprobs": "processed"}
    got = op(**moved({key: none_of(value) for key, value in given.items()}, device))
    assert all(len(part) == 0 for part in got if part is not None)


def test_requests_may_have_no_drafts(backend: str, device: str) -> None:
    case = make_chain(2, 0, VOCAB, filters="all").to(device)
    names = {name: case.keywords[name] for name in ("sampling", "draft_sampling")}
    got = acceptance_ratios(case.draft_ids, case.target_logits, case.draft_logits, **names)
    assert all(part.shape == (2, 0) for part in got[:-1]) and got.status.tolist() == [0, 0]


def test_active_must_be_bool() -> None:
    _, given = sampled()
    with pytest.raises(ValueError, match=r"sampling\.active must be bool, got int64"):
        sample(**{**given, "sampling": Sampling(active=ACTIVE.long())})
    with pytest.raises(ValueError, match="a tensor of bool"):
        sample(**{**given, "sampling": Sampling(active=True)})  # type: ignore[arg-type]
