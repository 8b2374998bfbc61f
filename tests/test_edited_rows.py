"""Edits in the ops on rows: each gives what it gives on rows that were changed before, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FILTERS, RULES, make_chain, make_rng
from check import assert_biased, assert_distribution
from edit_cases import make_edits
from op_calls import moved
from torch import Tensor
from tree_cases import TREE_RULES, make_tree

from specdec_kernels import (
    Edits,
    RngKey,
    RowEdits,
    Sampling,
    TokenCounts,
    acceptance_ratios,
    count_tokens,
    edit_rows,
    residual_probs,
    residual_sample,
    sample,
    verify_chain,
    verify_tree,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Given = dict[str, Any]


def same(ours: Any, theirs: Any) -> None:
    """Equal ids and status; numbers but for rounding: half rows and float32 ones are summed in other orders."""
    for name, mine, other in zip(type(ours)._fields, ours, theirs, strict=True):
        if mine is None or mine.dtype == torch.float32:
            torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5, equal_nan=True, msg=name)
        else:
            assert torch.equal(mine, other), name


def dense(logits: Tensor, edits: RowEdits | None) -> Tensor:
    """Rows with their edits, as another tensor."""
    if edits is None:
        return logits
    return moved(edits, "cpu").apply(logits.reshape(-1, logits.shape[-1])).view(logits.shape)


def compare(
    call: Callable[..., Any], given: Given, edits: RowEdits, draft_edits: RowEdits | None, device: str,
    places: Tensor | None = None,
) -> None:  # fmt: skip
    """The op on rows with edits, and on changed rows without; `places`: the target row of each draft row."""
    of_drafts = draft_edits
    if draft_edits is not None and places is not None:
        of_drafts = draft_edits.pick(lambda table: table[places])
    row_names = ("logits",) if "logits" in given else ("target_logits", "draft_logits")
    changed = dict(given)
    for name, of in zip(row_names, (edits, of_drafts), strict=False):
        if given.get(name) is not None:
            changed[name] = dense(given[name], of)
    named: Given = {"edits": edits} if draft_edits is None else {"edits": edits, "draft_edits": draft_edits}
    same(moved(call(**moved({**given, **named}, device)), "cpu"), moved(call(**moved(changed, device)), "cpu"))


def edits_of(vocab: int, logits: Tensor, seed: int, *args: Any, **named: Any) -> RowEdits:
    batch = len(named["cu_draft"]) - 1 if "cu_draft" in named else len(logits)
    return edit_rows(make_edits(batch, vocab, seed=seed), *args, vocab=vocab, **named, backend="reference")


def draft_places(batch: int, draft: int, cu_draft: Tensor | None = None) -> Tensor:
    """Number of the target row that belongs to each draft row."""
    if cu_draft is None:
        return torch.arange(batch * (draft + 1)).view(batch, -1)[:, :-1].flatten()
    lengths = cu_draft.diff()
    return torch.arange(int(cu_draft[-1])) + torch.arange(batch).repeat_interleave(lengths)


@pytest.mark.parametrize("vocab", [300, 4096 + 37])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sample(backend: str, device: str, vocab: int, filters: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(6, vocab, generator=g)).to(dtype)
    bits = torch.randint(-(2**31), 2**31 - 1, (6, (vocab + 31) // 32), generator=g, dtype=torch.int32)
    given = {
        "logits": logits, "sampling": Sampling.full(6, **FILTERS[filters]), "rng": make_rng(6), "purpose": "target",
        "num_samples": 2, "logprobs": "processed",
    }  # fmt: skip
    compare(sample, given, edits_of(vocab, logits, 1), None, device)
    compare(sample, {**given, "allowed": bits}, edits_of(vocab, logits, vocab), None, device)


@pytest.mark.parametrize("filters", ["temperature", "all", "greedy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_that_an_edit_makes_takes_or_leaves(backend: str, device: str, filters: str, dtype: torch.dtype) -> None:
    """Both tiles of a row of two have edits, that of the first tile's largest logit among them."""
    rows, vocab = 4, 4096 + 37
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits[:, 100] = 20
    logits[0, 1000] = torch.nan  # banned
    logits[1, 1001] = torch.nan  # not listed
    logits[2, 3000] = -torch.inf  # and plus infinity
    ids, bias = torch.tensor([[100, 1000, 3000]] * rows), torch.tensor([[-9.0, -torch.inf, 2.0]] * rows)
    bias[2, 2] = torch.inf
    edits = edit_rows(Edits(bias_ids=ids.int(), bias=bias), vocab=vocab, backend="reference")
    given = {
        "logits": logits, "sampling": Sampling.full(rows, **FILTERS.get(filters, {"temperature": 0.0})),
        "rng": make_rng(rows), "purpose": "target",
    }  # fmt: skip
    compare(sample, given, edits, None, device)
    drawn = sample(edits=moved(edits, device), **moved(given, device))
    assert [status & 1 for status in drawn.status.tolist()] == [0, 1, 1, 0]


def test_raw_logprobs_are_those_of_the_logits_as_given(backend: str, device: str) -> None:
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(1))
    edits = moved(edits_of(90, logits, 1), device)
    named = {"sampling": Sampling(), "rng": make_rng(5), "purpose": "target", "logprobs": "raw"}
    drawn = sample(logits.to(device), edits=edits, **moved(named, device))
    expected = logits.log_softmax(1).gather(1, drawn.token_ids.cpu())
    torch.testing.assert_close(drawn.logprobs.cpu(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rule", ["greedy", "match", "ratio", "topm"])
def test_raw_logprobs_of_a_chain_know_no_edits(backend: str, device: str, rule: str) -> None:
    case = make_chain(5, 3, 90, rule=rule, greedy_every=2)
    given = {
        "draft_ids": case.draft_ids, "target_logits": case.target_logits, "draft_logits": case.draft_logits,
        **case.keywords, "edits": edits_of(90, case.target_logits, 2, case.draft_ids), "logprobs": "raw",
    }  # fmt: skip
    out = moved(verify_chain(**moved(given, device)), "cpu")
    kept = out.token_ids >= 0
    expected = case.target_logits.log_softmax(2).gather(2, out.token_ids.clamp(min=0)[:, :, None])[:, :, 0]
    torch.testing.assert_close(out.logprobs[kept], expected[kept], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flat", [False, True], ids=["dense", "flat"])
def test_verify_chain(backend: str, device: str, rule: str, dtype: torch.dtype, flat: bool) -> None:
    for vocab, filters in ((300, "none"), (300, "all"), (4096 + 37, "top_p")):
        case = make_chain(4, 3, vocab, rule=rule, dtype=dtype, filters=filters, flat=flat, ragged=True, greedy_every=3)
        given = {
            "draft_ids": case.draft_ids, "target_logits": case.target_logits, "draft_logits": case.draft_logits,
            **case.keywords, "logprobs": "processed",
        }  # fmt: skip
        layout = {name: case.keywords[name] for name in ("cu_draft", "max_draft") if name in case.keywords}
        edits = edits_of(vocab, case.target_logits, 3, case.draft_ids, **layout)
        compare(verify_chain, given, edits, None, device)
        if case.draft_logits is not None:
            drafted = edits_of(vocab, case.target_logits, 4, case.draft_ids, **layout)
            places = draft_places(4, 3, case.keywords.get("cu_draft"))
            compare(verify_chain, given, edits, drafted, device, places)


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("filters", ["none", "all"])
def test_verify_tree(backend: str, device: str, rule: str, filters: str) -> None:
    for vocab, dtype in ((41, torch.float32), (300, torch.bfloat16)):
        case = make_tree(3, 7, vocab, rule=rule, filters=filters)
        ids, parents, target, draft = case.tensors
        target, draft = target.to(dtype), None if draft is None else draft.to(dtype)
        given = {"token_ids": ids, "parents": parents, "target_logits": target, "draft_logits": draft, **case.keywords}
        edits = edits_of(vocab, target, 5, ids, parents=parents)
        compare(verify_tree, given, edits, None, device)
        if draft is not None:
            compare(verify_tree, given, edits, edits_of(vocab, target, 6, ids, parents=parents), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_acceptance_ratios(backend: str, device: str, dtype: torch.dtype) -> None:
    case = make_chain(4, 3, 301, dtype=dtype, filters="top_p", ragged=True)
    given = {
        "draft_ids": case.draft_ids, "target_logits": case.target_logits, "draft_logits": case.draft_logits,
        "sampling": case.keywords["sampling"], "draft_sampling": case.keywords["draft_sampling"],
    }  # fmt: skip
    edits = edits_of(301, case.target_logits, 7, case.draft_ids)
    drafted = edits_of(301, case.target_logits, 8, case.draft_ids)
    compare(acceptance_ratios, given, edits, drafted, device, draft_places(4, 3))


@pytest.mark.parametrize("op", [residual_probs, residual_sample])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residuals(backend: str, device: str, op: Callable[..., Any], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(9)
    target, draft = ((2 * torch.randn(5, 300, generator=g)).to(dtype) for _ in range(2))
    given = {
        "target_logits": target, "draft_logits": draft, "sampling": Sampling.full(5, top_k=50),
        "draft_sampling": Sampling.full(5, temperature=0.8),
    }  # fmt: skip
    if op is residual_sample:
        given["rng"] = make_rng(5)
    compare(op, given, edits_of(300, target, 9), edits_of(300, draft, 10), device)


def test_rows_without_edits_are_the_rows(backend: str, device: str) -> None:
    case = make_chain(4, 3, 300, ragged=True)
    none = edit_rows(Edits(), case.draft_ids, vocab=300, backend="reference")
    given = {
        "draft_ids": case.draft_ids, "target_logits": case.target_logits, "draft_logits": case.draft_logits,
        **case.keywords,
    }  # fmt: skip
    compare(verify_chain, given, none, none, device, draft_places(4, 3))


def test_speculation_changes_no_text(backend: str, device: str, is_slow: bool) -> None:
    """Greedy and seeded texts with every edit: drafts verified with `match` or one token after another."""
    batch, vocab, length = 4, 40, 8 if is_slow else 24
    g = torch.Generator().manual_seed(12)
    table = 3 * torch.randn(vocab, vocab, generator=g)  # logits after each token
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3])
    plain = _text(table, batch, length, temperature, device, draft=0)
    for draft in (1, 3):
        assert torch.equal(plain, _text(table, batch, length, temperature, device, draft=draft))


def _text(table: Tensor, batch: int, length: int, temperature: Tensor, device: str, *, draft: int) -> Tensor:
    """Decode with edits of the text so far; drafts follow the target's most likely id, ignorant of edits."""
    edits = make_edits(batch, len(table), seed=12)
    assert edits.counts.token_ids is not None and edits.slots is not None
    wanted = torch.arange(batch) + 5
    texts: list[list[int]] = [[1, 2, 3, 4] for _ in range(batch)]
    while min(map(len, texts)) < length:
        done = torch.tensor([len(text) - 4 for text in texts])
        now = edits._replace(
            min_tokens=(wanted - done).int(), tail=torch.tensor([text[-4:] for text in texts], dtype=torch.int32)
        )
        chain = [torch.tensor([text[-1] for text in texts])]
        for _ in range(draft):
            chain.append(table[chain[-1]].argmax(1))
        logits, ids = table[torch.stack(chain, 1)], torch.stack(chain[1:], 1) if draft else torch.empty(batch, 0).long()
        rows = edit_rows(*moved((now, ids), device), vocab=len(table))
        rng = RngKey(torch.arange(batch), done)
        given = {"sampling": Sampling(temperature=temperature), "rng": rng, "rule": "match"}
        out = moved(verify_chain(*moved((ids, logits), device), edits=rows, **moved(given, device)), "cpu")
        assert not out.status.any()
        count_tokens(edits.counts, out.token_ids, slots=edits.slots, backend="reference")
        for text, new in zip(texts, out.token_ids.tolist(), strict=True):
            text += [x for x in new if x >= 0]
    return torch.tensor([text[:length] for text in texts])


# Texts under penalties: raw rows that do not depend on the text, so that the edits do all that does.
RAW, DRAFT = torch.tensor([1.2, 0.3, -0.5]), torch.tensor([0.2, 0.9, 0.1])
PENALTIES = {"repetition": 1.6, "frequency": 0.7, "presence": -0.4}
LENGTH, TEXTS = 4, 40_000


def exact() -> tuple[Tensor, Tensor]:
    """(texts [n, LENGTH], their probabilities) of the target, token after token."""
    texts = torch.cartesian_prod(*[torch.arange(3)] * LENGTH)
    p = torch.ones(len(texts), dtype=torch.float64)
    for i in range(LENGTH):
        times = torch.nn.functional.one_hot(texts[:, :i], 3).sum(1) if i else torch.zeros(len(texts), 3)
        row = torch.where(RAW > 0, RAW / PENALTIES["repetition"], RAW * PENALTIES["repetition"])
        row = torch.where(times > 0, row - PENALTIES["frequency"] * times - PENALTIES["presence"], RAW)
        p *= row.double().softmax(1).gather(1, texts[:, i : i + 1])[:, 0]
    return texts, p


def decoded(rule: str, device: str, texts: int, *, frozen: bool = False) -> Tensor:
    """Counts of texts drafted and verified with penalties; `frozen`: those of the first row at all of them."""
    counts = TokenCounts.empty(texts, 4, device=device)
    every = {name: torch.full((texts,), value, device=device) for name, value in PENALTIES.items()}
    edits = Edits(**every, counts=counts)
    done, step = torch.zeros(texts, dtype=torch.int64, device=device), 0
    out = torch.full((texts, LENGTH + 3), -1, device=device)
    while int(done.min()) < LENGTH:
        rng = RngKey(torch.arange(texts, device=device), done, torch.full_like(done, step))
        ids = torch.empty(texts, 0, dtype=torch.int64, device=device)
        for i in range(2):
            rows = edit_rows(edits, ids, vocab=3, only_last=True)
            drawn = sample(
                DRAFT.to(device).expand(texts, 3), sampling=Sampling(), rng=rng._replace(position=done + i),
                purpose="draft", edits=rows,
            )  # fmt: skip
            ids = torch.cat([ids, drawn.token_ids], 1)
        rows = edit_rows(edits, ids, vocab=3)
        of_target = rows if not frozen else rows.pick(lambda table: table[::3].repeat_interleave(3, 0).contiguous())
        verdict = verify_chain(
            ids, RAW.to(device).expand(texts, 3, 3), DRAFT.to(device).expand(texts, 2, 3), sampling=Sampling(),
            draft_sampling=Sampling(), rng=rng, rule=rule, edits=of_target, draft_edits=rows,
        )  # fmt: skip
        places = (done[:, None] + torch.arange(3, device=device)).clamp(max=LENGTH + 2)
        out.scatter_(1, places, torch.where(verdict.token_ids >= 0, verdict.token_ids, out.gather(1, places)))
        count_tokens(counts, verdict.token_ids)
        done, step = done + verdict.num_accepted + 1, step + 1
    key = (out[:, :LENGTH] * 3 ** torch.arange(LENGTH - 1, -1, -1, device=device)).sum(1)
    return torch.bincount(key.cpu(), minlength=3**LENGTH)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_texts_under_penalties_follow_the_target(fast_backend: str, rule: str) -> None:
    device, texts = "cuda" if fast_backend == "cuda" else "cpu", 3000 if fast_backend == "reference" else TEXTS
    assert_distribution(decoded(rule, device, texts), exact()[1], rule)


def test_the_penalties_of_the_first_position_at_all_of_them_are_biased() -> None:
    assert_biased(decoded("ratio", "cpu", TEXTS, frozen=True), exact()[1], "the first row's penalties")
