"""Draft rows of candidates alone: the dense rows with -inf elsewhere, id for id; exact; and flagged where wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import make_chain, make_rng
from check import assert_biased, assert_distribution
from exact_chains import joint_error, processed
from exact_trees import joint_error as tree_joint_error
from exact_trees import output_distribution, random_rows
from sparse_cases import sparse_chain, sparse_of, sparse_tree
from torch import Tensor
from tree_cases import make_tree

from specdec_kernels import (
    RngKey,
    Sampling,
    SparseRows,
    Status,
    acceptance_ratios,
    sample,
    use_backend,
    verify_chain,
    verify_tree,
)

INF = float("inf")


def moved(rows: SparseRows, device: str) -> SparseRows:
    return SparseRows(*(part.to(device) for part in rows))


def assert_like_dense(op: Any, arguments: tuple[Any, ...], rows: SparseRows, vocab: int, **keywords: Any) -> Any:
    """A call with candidates gives what the call with dense rows gives."""
    ours, theirs = op(*arguments, rows, **keywords), op(*arguments, rows.dense(vocab), **keywords)
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        if a is None:
            continue
        assert torch.equal(a, b) if not a.is_floating_point() else torch.allclose(a, b, atol=1e-5), name
    return ours


@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_chain_is_decided_as_with_dense_rows(backend: str, device: str, is_slow: bool, rule: str, dtype: Any) -> None:
    batch, vocab = 3 if is_slow else 40, 70 if is_slow else 200
    accepted = []
    for k, ids in ((5, torch.int32), (12, torch.int64)):
        case = make_chain(batch, 4, vocab, rule=rule, dtype=dtype, filters="temperature", ragged=True, greedy_every=5)
        rows = moved(sparse_chain(case, k, ids), device)
        case = case.to(device)
        result = assert_like_dense(
            verify_chain, (case.draft_ids, case.target_logits), rows, vocab, logprobs="processed", **case.keywords
        )
        accepted.append(float(result.num_accepted.float().mean()))
    assert max(accepted) > 0.1


def test_a_chain_of_several_tiles_is_decided_as_with_dense_rows(backend: str, device: str, is_slow: bool) -> None:
    vocab, batch = 4200, 2 if is_slow else 10  # a tile has 4096 ids
    for rule in ("ratio", "block"):
        case = make_chain(batch, 3, vocab, rule=rule, closeness=0.3)
        rows, case = moved(sparse_chain(case, 9), device), case.to(device)
        result = assert_like_dense(verify_chain, (case.draft_ids, case.target_logits), rows, vocab, **case.keywords)
        assert not result.status.any()


def test_a_flat_chain_is_decided_as_with_dense_rows(backend: str, device: str, is_slow: bool) -> None:
    batch, vocab = 4 if is_slow else 50, 90
    dense = make_chain(batch, 3, vocab, ragged=True)
    inside = dense.draft_ids >= 0
    rows = SparseRows(*(part[inside].contiguous() for part in sparse_chain(dense, 7)))
    for rule in ("ratio", "block"):
        case = make_chain(batch, 3, vocab, rule=rule, ragged=True, flat=True).to(device)
        arguments = (case.draft_ids, case.target_logits)
        assert_like_dense(verify_chain, arguments, moved(rows, device), vocab, **case.keywords)


@pytest.mark.parametrize("rule", ["recursive", "independent", "greedy_multi_draft", "traversal"])
def test_a_tree_is_decided_as_with_dense_rows(backend: str, device: str, is_slow: bool, rule: str) -> None:
    accepted = 0
    for vocab, batch in ((60, 3 if is_slow else 40), (4200, 1 if is_slow else 4)):
        case = make_tree(batch, 7, vocab, rule="recursive", filters="temperature", greedy_every=5)
        if rule == "independent":
            case.keywords["replacement"] = True
        else:
            case.keywords["rule"] = rule
        rows, case = moved(sparse_tree(case, 12), device), case.to(device)
        arguments = (case.token_ids, case.parents, case.target_logits)
        result = assert_like_dense(verify_tree, arguments, rows, vocab, **case.keywords)
        accepted += int(result.num_accepted.sum())
    assert accepted > 0


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_rules_of_a_chain_are_exact_where_q_has_few_ids(rule: str) -> None:
    g, p, q = torch.Generator().manual_seed(4), {}, {}
    for ids in itertools.chain(*(itertools.product(range(4), repeat=n) for n in range(4))):
        p[ids] = processed(2 * torch.randn(4, generator=g))
        q[ids] = processed(2 * torch.randn(4, generator=g), top_k=2)
    assert joint_error(rule, p, q, vocab=4, draft=3) < 1e-12


@pytest.mark.parametrize(("rule", "kind"), [("recursive", "distinct"), ("iid", "iid"), ("traversal", "distinct")])
def test_rules_of_a_tree_are_exact_where_q_has_few_ids(rule: str, kind: str) -> None:
    parents = [-1, 0, 0, 1, 1]
    p, q = random_rows(4, 2, 1), random_rows(4, 2, 51)
    for ids, row in q.items():
        fewer = torch.where(row >= row.topk(2).values[-1], row, 0.0)
        q[ids] = fewer / fewer.sum()
    assert tree_joint_error(output_distribution(rule, kind, parents, p, q), p, 4, 3) < 1e-12


def _frequencies(rule: str, device: str, normalised: bool) -> tuple[Tensor, Tensor]:
    """(counts of first tokens, their exact distribution) where drafts are drawn from three candidates of eight."""
    vocab, batch = 8, 15_000
    g = torch.Generator().manual_seed(3)
    target, drafted = torch.randn(3, vocab, generator=g), torch.randn(2, vocab, generator=g)
    logits, ids = drafted.topk(3, dim=1)
    draft_ids = ids.gather(1, torch.multinomial(logits.softmax(1), batch, replacement=True, generator=g)).T.contiguous()
    repeat = lambda part: part.expand(batch, *part.shape).contiguous().to(device)  # noqa: E731
    rows: Any = SparseRows(*map(repeat, (ids, logits, logits.logsumexp(1))))
    if not normalised:  # q of all ids, where the drafts came from three
        rows = repeat(drafted)
    i = torch.arange(batch, device=device)
    rng = RngKey(i * 7919 + 5, torch.zeros_like(i), torch.zeros_like(i))
    result = verify_chain(
        draft_ids.to(device), repeat(target), rows, sampling=Sampling(), draft_sampling=Sampling(), rng=rng, rule=rule
    )
    assert not result.status.any()
    return torch.bincount(result.token_ids[:, 0].cpu(), minlength=vocab), target[0].double().softmax(0)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_tokens_follow_the_target_and_a_q_over_all_ids_would_not(fast_backend: str, rule: str) -> None:
    device = "cuda" if fast_backend == "cuda" else "cpu"
    assert_distribution(*_frequencies(rule, device, True), rule)
    assert_biased(*_frequencies(rule, device, False), rule)


def test_rows_that_are_no_distribution_are_flagged_and_no_other_request(backend: str, device: str) -> None:
    case = make_chain(8, 2, 50)
    good = sparse_chain(case, 6)
    ids, logits, logsumexp = (part.clone() for part in good)
    logits[1] += 0.01  # does not sum to 1
    ids[2, 0, 1] = ids[2, 0, 0]  # twice
    ids[3, 0, 2] = 50  # outside
    ids[4, 0, 0] = -1  # padding that has a logit
    logsumexp[5, 0] = float("nan")
    logits[6, 0] = -INF  # nothing
    logits = logits.where(torch.arange(6) < 6, logits)
    rows, whole, case = moved(SparseRows(ids, logits, logsumexp), device), moved(good, device), case.to(device)
    for rule in ("ratio", "block"):
        keywords = case.keywords | {"rule": rule}
        ours = verify_chain(case.draft_ids, case.target_logits, rows, **keywords)
        clean = verify_chain(case.draft_ids, case.target_logits, whole, **keywords)
        assert not clean.status.any()
        assert ours.status.tolist() == [0] + [int(Status.BAD_DRAFT)] * 6 + [0], rule
        assert not ours.num_accepted[1:7].any()
        for b in (0, 7):
            assert torch.equal(ours.token_ids[b], clean.token_ids[b])


def test_a_tree_flags_rows_that_are_no_distribution(backend: str, device: str) -> None:
    case = make_tree(4, 4, 50, max_depth=2)
    assert case.draft_logits is not None
    nobody = torch.full((4, 4, 1), -1)
    ids, logits, logsumexp = sparse_of(case.draft_logits, 6, nobody, torch.ones(4))
    ids[1, 0, 1] = ids[1, 0, 0]
    logsumexp[2, 0] += 0.01
    rows, case = moved(SparseRows(ids, logits, logsumexp), device), case.to(device)
    for rule in ("recursive", "traversal", "greedy_multi_draft"):
        keywords = case.keywords | {"rule": rule}
        result = verify_tree(case.token_ids, case.parents, case.target_logits, rows, **keywords)
        assert [bool(s & Status.BAD_DRAFT) for s in result.status.tolist()] == [False, True, True, False], rule


def test_a_drafted_id_that_was_not_kept_is_rejected_and_flagged(backend: str, device: str) -> None:
    rows = SparseRows(torch.tensor([[[1, 2]]]), torch.zeros(1, 1, 2), torch.full((1, 1), 2.0).log())
    target = torch.tensor([[[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    for rule in ("ratio", "block"):
        result = verify_chain(
            torch.tensor([[0]], device=device), target.to(device), moved(rows, device), sampling=Sampling(),
            draft_sampling=Sampling(), rng=RngKey(*(part.to(device) for part in make_rng(1))), rule=rule,
        )  # fmt: skip
        assert (int(result.num_accepted), int(result.status)) == (0, int(Status.ZERO_DRAFT))


def test_what_sample_keeps_is_the_draft_distribution(backend: str, device: str) -> None:
    g = torch.Generator().manual_seed(8)
    logits, temperature = torch.randn(5, 80, generator=g).to(device), torch.full((5,), 0.7, device=device)
    rng = RngKey(*(part.to(device) for part in make_rng(5)))
    drawn = sample(logits, sampling=Sampling.full(5, temperature=0.7, top_k=4, device=device), rng=rng, purpose="draft")
    rows = drawn.keep(logits, 6)
    assert rows.ids[:, 4:].eq(-1).all() and rows.ids[:, :4].ge(0).all()
    target = torch.stack([logits, logits], 1)  # the draft's own distribution: q <= p is all that can be rejected
    result = verify_chain(
        drawn.token_ids, target, SparseRows(*(part[:, None].contiguous() for part in rows)), rng=rng,
        sampling=Sampling.full(5, temperature=0.7, top_k=4, device=device), draft_sampling=Sampling(temperature),
    )  # fmt: skip
    assert result.status.tolist() == [0] * 5 and result.num_accepted.tolist() == [1] * 5


def test_arguments_that_only_dense_rows_know_are_refused() -> None:
    case = make_chain(2, 2, 40)
    rows, arguments = sparse_chain(case, 5), (case.draft_ids, case.target_logits)
    map_ = torch.arange(5, dtype=torch.int32)
    stats = (rows.logsumexp, rows.logsumexp)
    filtered = Sampling.full(2, temperature=1.0, top_k=3)
    for keywords, message in (
        ({"token_map": map_}, "token_map must be None where draft_logits are SparseRows"),
        ({"draft_stats": stats}, "draft_stats must be None"),
        ({"draft_sampling": filtered}, "a temperature alone"),
        ({"draft_sampling": None}, "draft_sampling must be given"),
    ):
        with pytest.raises(ValueError, match=message):
            verify_chain(*arguments, rows, **(case.keywords | keywords))
    for wrong, message in (
        (rows._replace(ids=rows.ids.float()), "draft_logits.ids must be int32 or int64"),
        (rows._replace(ids=rows.ids[..., :4]), "draft_logits.ids must be"),
        (rows._replace(logsumexp=rows.logsumexp[:, :1]), "draft_logits.logsumexp must be"),
        (rows._replace(logits=rows.logits[:1]), "draft_logits.logits must be"),
    ):
        with pytest.raises(ValueError, match=message):
            verify_chain(*arguments, wrong, **case.keywords)
    with pytest.raises(ValueError, match="draft_logits must be"):
        acceptance_ratios(*arguments, rows, sampling=Sampling(), draft_sampling=Sampling())  # type: ignore[arg-type]


def test_the_result_depends_on_nothing_but_the_request(threads: None) -> None:
    case = make_chain(9, 3, 5000)
    rows = sparse_chain(case, 20)
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        with use_backend("cpu"):
            found.append(verify_chain(case.draft_ids, case.target_logits, rows, **case.keywords).token_ids)
    assert torch.equal(*found)
