"""`top` of sample, verify_chain and verify_tree: ranks and likeliest ids of every emitted token, from the same call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import make_chain
from check import assert_same
from edit_cases import make_edits
from torch import Tensor
from tree_cases import make_tree

from specdec_kernels import (
    ChainResult,
    MixedRules,
    RngKey,
    SampleResult,
    Sampling,
    TreeResult,
    _rows,
    edit_rows,
    sample,
    token_logprobs,
    verify_chain,
    verify_tree,
)

TOP, BATCH, DRAFT = 7, 3, 3
LISTING = ("ranks", "top_ids", "top_logprobs")
# Less than a block of 64 and one past a tile of the CPU.
SIZES = [41, 2113]
CHAINS = ("ratio", "match", "block", "greedy", "typical", "topm")
TREES = ("match", "target_only", "recursive", "traversal", "greedy", "typical")


def rows_of(result: SampleResult | ChainResult | TreeResult, width: int) -> list[tuple[int, int, int]]:
    """(request, place, row) of each token: the row of a chain is its place, of a tree the node before the token."""
    found = []
    for b, tokens in enumerate(result.token_ids.tolist()):
        path = result.path[b].tolist() if isinstance(result, TreeResult) else list(range(1, width))
        before = [0, *path]
        found += [(b, i, b * width + before[i]) for i, token in enumerate(tokens) if token >= 0]
    return found


def assert_listed(
    got: SampleResult | ChainResult | TreeResult, target: Tensor, mode: str, sampling: Sampling,
    **of_rows: Tensor | None,
) -> None:  # fmt: skip
    """Of each token what `token_logprobs` of the reference tells of its row alone; of other places nothing."""
    assert got.ranks is not None and got.top_ids is not None and got.top_logprobs is not None
    has = torch.zeros_like(got.token_ids, dtype=torch.bool)
    for b, i, row in rows_of(got, target.shape[1]):
        has[b, i] = True
        more: dict[str, Any] = {}
        if mode == "processed":
            more = {name: value[row : row + 1] for name, value in of_rows.items() if isinstance(value, Tensor)}
            more["sampling"] = Sampling(*(None if part is None else part[b : b + 1] for part in sampling))
        want = token_logprobs(
            target.flatten(0, 1)[row : row + 1], got.token_ids[b, i : i + 1], top=TOP, logprobs=mode,
            backend="reference", **more,
        )  # fmt: skip
        assert int(got.ranks[b, i]) == int(want.ranks), (b, i)
        assert got.top_ids[b, i].tolist() == want.top_ids[0].tolist(), (b, i)
        torch.testing.assert_close(got.top_logprobs[b, i], want.top_logprobs[0], rtol=1e-5, atol=2e-5)
    assert bool(has.any())
    assert not got.ranks[~has].any() and not got.top_logprobs[~has].any() and bool((got.top_ids[~has] == -1).all())


def on(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {name: on(part, device) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = [on(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.to(device) if isinstance(value, Tensor) else value


def home(result: Any) -> Any:
    return type(result)(*(None if part is None else part.cpu() for part in result))


def listed(verify: Any, tensors: Any, keywords: Any, device: str, **more: Any) -> Any:
    """A call with `top`, which changes nothing of what the call without gives."""
    tensors, keywords = on(tuple(tensors), device), on({**keywords, **more}, device)
    plain, got = verify(*tensors, **keywords), verify(*tensors, **keywords, top=TOP)
    count = len(plain) - len(LISTING)
    assert plain[count:] == (None, None, None)
    names = tuple(name for name in type(plain)._fields[:count] if name != "logprobs")
    assert_same(tuple(getattr(got, n) for n in names), tuple(getattr(plain, n) for n in names), names)
    torch.testing.assert_close(got.logprobs, plain.logprobs, rtol=1e-5, atol=2e-5, equal_nan=True)
    return home(got)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("rule", CHAINS)
def test_tokens_of_a_chain_are_listed(backend: str, device: str, rule: str, mode: str) -> None:
    for vocab in SIZES[: 1 if backend in ("triton", "cuda_host") else None]:
        case = make_chain(BATCH, DRAFT, vocab, rule=rule, filters="all", greedy_every=3)
        got = listed(verify_chain, (case.draft_ids, case.target_logits, case.draft_logits), case.keywords, device,
                     logprobs=mode)  # fmt: skip
        by_argmax = rule in ("greedy", "topm")
        assert_listed(got, case.target_logits, mode, Sampling() if by_argmax else case.keywords["sampling"])


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("rule", TREES)
def test_tokens_of_a_tree_are_listed(backend: str, device: str, rule: str, mode: str) -> None:
    for vocab in SIZES[: 1 if backend in ("triton", "cuda_host") else None]:
        case = make_tree(BATCH, 6, vocab, rule=rule, filters="all", greedy_every=3)
        got = listed(verify_tree, case.tensors, case.keywords, device, logprobs=mode)
        assert_listed(got, case.tensors[2], mode, Sampling() if rule == "greedy" else case.keywords["sampling"])


def draws(batch: int, vocab: int) -> tuple[Tensor, dict[str, Any]]:
    """Rows and arguments of `sample`; the first request is greedy, and its edits and mask leave ids to draw."""
    g = torch.Generator().manual_seed(vocab)
    sampling = Sampling.full(batch, temperature=0.8, top_k=30, top_p=0.9)
    assert sampling.temperature is not None
    sampling.temperature[0] = 0.0
    rng = RngKey(torch.arange(batch), torch.arange(batch) + 7)
    return 2 * torch.randn(batch, vocab, generator=g), {"sampling": sampling, "rng": rng, "purpose": "target"}


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_drawn_tokens_are_listed(backend: str, device: str, mode: str) -> None:
    for vocab in SIZES[: 1 if backend in ("triton", "cuda_host") else None]:
        logits, keywords = draws(BATCH, vocab)
        got = listed(sample, (logits,), keywords, device, logprobs=mode)
        assert_listed(got, logits[:, None], mode, keywords["sampling"])


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_edits_and_masks_are_of_processed_log_probabilities_of_draws(backend: str, device: str, mode: str) -> None:
    logits, keywords = draws(BATCH, 90)
    allowed, edits = words(BATCH, 90), edit_rows(make_edits(BATCH, 90, seed=2), vocab=90, backend="reference")
    got = listed(sample, (logits,), keywords, device, logprobs=mode, allowed=allowed, edits=edits)
    rows = _rows.edited(logits, None, edits) if mode == "processed" else logits
    assert_listed(got, rows[:, None], mode, keywords["sampling"], allowed=allowed)


def test_rows_that_draw_nothing_list_nothing(backend: str, device: str) -> None:
    logits, keywords = draws(4, 70)
    logits[1], logits[2, 5] = float("nan"), float("nan")
    keywords["sampling"] = keywords["sampling"]._replace(active=torch.tensor([True, False, True, True]))
    got = listed(sample, (logits,), keywords, device, logprobs="raw")
    assert got.status.tolist() == [0, 0, 1, 0] and got.token_ids[1:3].tolist() == [[-1], [-1]]
    assert_listed(got, logits[:, None], "raw", keywords["sampling"])


def words(rows: int, vocab: int) -> Tensor:
    bits = torch.randint(-(2**31), 2**31, (rows, (vocab + 31) // 32)).int()
    bits[:, 0] |= 1
    return bits


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_edits_and_masks_are_of_processed_log_probabilities(backend: str, device: str, mode: str) -> None:
    case = make_chain(BATCH, DRAFT, 90, rule="match", filters="top_p")
    allowed = words(BATCH * (DRAFT + 1), 90)
    edits = edit_rows(make_edits(BATCH, 90, seed=2), case.draft_ids, vocab=90, backend="reference")
    got = listed(verify_chain, (case.draft_ids, case.target_logits), case.keywords | {"draft_sampling": None}, device,
                 logprobs=mode, allowed=allowed, edits=edits)  # fmt: skip
    rows = case.target_logits.flatten(0, 1)
    if mode == "processed":
        rows = _rows.edited(rows, None, edits)
    assert_listed(got, rows.view_as(case.target_logits), mode, case.keywords["sampling"], allowed=allowed)


def test_flat_chains_and_both_id_types(backend: str, device: str) -> None:
    """Requests of 0, 1, 2 and 3 drafts give in a flat batch what they give in a dense one."""
    dense = make_chain(4, DRAFT, 70, rule="match", ragged=True, drafts="point")
    flat = make_chain(4, DRAFT, 70, rule="match", ragged=True, drafts="point", flat=True)
    for dtype in (torch.int32, torch.int64):
        one, other = (
            listed(verify_chain, (case.draft_ids.to(dtype), case.target_logits), case.keywords, device, logprobs="raw")
            for case in (dense, flat)
        )
        assert one.top_ids.dtype == dtype
        for name in ("token_ids", *LISTING):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_requests_that_are_not_active_or_bad_list_nothing(backend: str, device: str) -> None:
    case = make_chain(4, DRAFT, 70, rule="match", drafts="point")
    case.target_logits[1] = float("nan")
    case.target_logits[2, 0, 5] = float("nan")
    sampling = case.keywords["sampling"]._replace(active=torch.tensor([True, False, True, True]))
    keywords = {**case.keywords, "sampling": sampling}
    got = listed(verify_chain, (case.draft_ids, case.target_logits), keywords, device, logprobs="raw")
    assert got.status.tolist() == [0, 0, 1, 0]
    assert_listed(got, case.target_logits, "raw", sampling)
    assert bool((got.token_ids[1:3] == -1).all())


def test_a_raw_row_whose_nan_the_mask_hides_has_no_list(backend: str, device: str) -> None:
    target = torch.randn(1, 1, 40)
    target[0, 0, 33] = float("nan")
    case = make_chain(1, 0, 40, rule="greedy", drafts="point")
    allowed = torch.tensor([[-1, 0]], dtype=torch.int32)
    got = listed(verify_chain, (case.draft_ids, target), case.keywords, device, logprobs="raw", allowed=allowed)
    assert int(got.token_ids) >= 0 and bool(got.logprobs.isnan())
    assert not got.ranks.any() and bool((got.top_ids == -1).all()) and bool((got.top_logprobs == -torch.inf).all())


def test_each_rule_of_a_mixed_batch_lists_its_own_requests(backend: str, device: str) -> None:
    case = make_chain(4, DRAFT, 70, rule="ratio")
    mixed = MixedRules(("greedy", "ratio"), torch.tensor([1, 0, 1, 0], dtype=torch.int32))
    keywords = {**case.keywords, "rule": mixed}
    got = listed(
        verify_chain, (case.draft_ids, case.target_logits, case.draft_logits), keywords, device, logprobs="raw"
    )
    assert_listed(got, case.target_logits, "raw", case.keywords["sampling"])


def test_results_that_are_given_are_filled(backend: str, device: str) -> None:
    case = make_tree(BATCH, 6, 70, rule="match").to(device)
    want = verify_tree(*case.tensors, **case.keywords, logprobs="raw", top=TOP)
    out = TreeResult(*(torch.full_like(part, 99) for part in want if part is not None))
    got = verify_tree(*case.tensors, **case.keywords, logprobs="raw", top=TOP, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(out, want, TreeResult._fields)


def test_results_of_a_draw_that_are_given_are_filled(backend: str, device: str) -> None:
    logits, keywords = on(draws(BATCH, 70), device)
    want = sample(logits, **keywords, top=TOP)
    out = SampleResult(*(torch.full_like(part, 99) for part in want if part is not None))
    got = sample(logits, **keywords, top=TOP, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(out, want, SampleResult._fields)


def test_one_rank_of_a_group_lists_what_no_group_does() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for verify, case in ((verify_chain, make_chain(BATCH, DRAFT, 70)), (verify_tree, make_tree(BATCH, 6, 70))):
            tensors = case.tensors if verify is verify_tree else (case.draft_ids, case.target_logits, case.draft_logits)
            keywords = {**case.keywords, "logprobs": "raw", "top": TOP}
            want = verify(*tensors, **keywords, backend="reference")
            got = verify(*tensors, **keywords, group=dist.group.WORLD, vocab_offsets=[0, 70])
            assert_same(got, want, type(want)._fields)
        logits, more = draws(BATCH, 70)
        want = sample(logits, **more, logprobs="raw", top=TOP, backend="reference")
        got = sample(logits, **more, logprobs="raw", top=TOP, group=dist.group.WORLD, vocab_offsets=[0, 70])
        assert_same(got, want, SampleResult._fields)
    finally:
        dist.destroy_process_group()


def test_results_do_not_depend_on_the_number_of_threads(threads: None) -> None:
    """The rows of one request are split over threads."""
    case = make_chain(1, DRAFT, 40000, rule="match", filters="temperature", drafts="point")
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        results.append(verify_chain(case.draft_ids, case.target_logits, **case.keywords, logprobs="raw", top=50))
    assert_same(*results, ChainResult._fields)


def test_a_compiled_call_lists_the_same() -> None:
    case = make_chain(BATCH, DRAFT, 70, rule="match", drafts="point")

    def step(ids: Tensor, target: Tensor) -> ChainResult:
        return verify_chain(ids, target, **case.keywords, logprobs="raw", top=TOP)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert_same(
        compiled(case.draft_ids, case.target_logits), step(case.draft_ids, case.target_logits), ChainResult._fields
    )


def test_wrong_arguments_are_refused() -> None:
    case = make_chain(BATCH, DRAFT, 70, rule="match", drafts="point")
    with pytest.raises(ValueError, match="verify_chain: top must be None without logprobs, got 3"):
        verify_chain(case.draft_ids, case.target_logits, **case.keywords, top=3)
    with pytest.raises(ValueError, match=r"verify_chain: top must be an int in \[0, 128\], got 129"):
        verify_chain(case.draft_ids, case.target_logits, **case.keywords, logprobs="raw", top=129)
    logits, keywords = draws(BATCH, 70)
    with pytest.raises(ValueError, match="sample: num_samples must be 1 with top, got 2"):
        sample(logits, **keywords, num_samples=2, top=3)
    with pytest.raises(ValueError, match="sample: token_map must be None with top: "):
        sample(logits, **keywords, token_map=torch.arange(70).int(), top=3)
    with pytest.raises(ValueError, match=r"sample: top must be an int in \[0, 128\], got -1"):
        sample(logits, **keywords, top=-1)
