"""Tensor parallelism: processes that hold a part of the vocabulary each decide as one rank does, bit for bit alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FILTERS, make_rng
from shard_cases import (
    Call,
    branch_call,
    chain_calls,
    edited_calls,
    hard_rows_call,
    layout_calls,
    logprob_calls,
    mapped_call,
    ratio_calls,
    residual_calls,
    run_on_ranks,
    sample_calls,
    sparse_calls,
    tree_calls,
    whole_probs,
    wide_call,
)
from torch import Tensor

from specdec_kernels import (
    Sampling,
    acceptance_ratios,
    residual_sample,
    sample,
    token_logprobs,
    use_backend,
    verify_chain,
    verify_tree,
)

BYTES_A_ROW = 64  # without filters
LOGPROBS = dict(zip(FILTERS, (None, "processed", "raw", None, "processed", "raw"), strict=True))


def calls_with(filters: str, vocab: int = 40, batch: int = 8, seed: int = 0) -> list[Call]:
    """Every rule."""
    logprobs = LOGPROBS[filters]
    made = chain_calls(vocab, batch, filters, seed, logprobs) + tree_calls(vocab, batch, filters, seed, logprobs)
    return made + sample_calls(vocab, 2 * batch, filters, seed)


def agree(a: Tensor, b: Tensor) -> bool:
    """The same bits, NaN counted as equal."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(ranks: int, calls: list[Call]) -> None:
    """All ranks agree on every result; it is that of one rank, log-probabilities within rounding."""
    answers = run_on_ranks(ranks, calls)
    for i, call in enumerate(calls):
        expected = call.one_rank()
        first = answers[0][i]
        assert first.exchanges <= call.exchanges, call.name
        for name, want, *got in zip(expected._fields, expected, *(a[i].results for a in answers), strict=True):
            what = f"{call.name}: {name}"
            if want is None:
                assert got[0] is None, what
                continue
            assert all(agree(got[0], other) for other in got[1:]), what
            if want.is_floating_point():
                torch.testing.assert_close(got[0], want, rtol=1e-6, atol=1e-6, equal_nan=True, msg=what)
            else:
                assert torch.equal(got[0], want), f"{what}: {got[0]} against {want}"


@pytest.mark.parametrize(("ranks", "filters", "every"), [(2, "all", 3), (4, "none", 2), (8, "top_p", 4)])
def test_ranks_decide_as_one_under_many_rules(ranks: int, filters: str, every: int) -> None:
    check(ranks, calls_with(filters)[1::every])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("filters", FILTERS)
def test_ranks_decide_as_one_under_every_rule_and_filter(ranks: int, filters: str) -> None:
    check(ranks, calls_with(filters, vocab=83, batch=16, seed=1))


@pytest.mark.parametrize(("ranks", "vocab"), [(2, 37), (4, 300), pytest.param(8, 3000, marks=pytest.mark.slow)])
def test_thresholds_are_exact_on_hard_rows(ranks: int, vocab: int) -> None:
    check(ranks, [hard_rows_call(vocab, 256, seed) for seed in range(2)])


def test_layouts_maps_bits_and_branches() -> None:
    calls = [mapped_call(40, 12, filters) for filters in ("none", "all")] + [branch_call(40, 12, 0)]
    check(2, calls + layout_calls(40, 12, "ratio") + layout_calls(40, 12, "block") + layout_calls(40, 12, "greedy"))


@pytest.mark.parametrize(("ranks", "filters"), [(2, "none"), (4, "all"), (8, "top_p")])
def test_acceptance_ratios_are_those_of_one_rank(ranks: int, filters: str) -> None:
    check(ranks, ratio_calls(61, 16, filters))


@pytest.mark.parametrize(("ranks", "filters"), [(2, "none"), (4, "all"), (8, "top_p")])
def test_log_probabilities_are_those_of_one_rank(ranks: int, filters: str) -> None:
    check(ranks, logprob_calls(61, 16, filters))


@pytest.mark.parametrize(("ranks", "filters"), [(2, "none"), (4, "all")])
def test_edits_are_those_of_one_rank(ranks: int, filters: str) -> None:
    check(ranks, edited_calls(61, 12, filters))


@pytest.mark.parametrize(("ranks", "filters"), [(2, "none"), (4, "all"), (8, "top_p")])
def test_residuals_are_those_of_one_rank(ranks: int, filters: str) -> None:
    check(ranks, residual_calls(61, 16, filters))


@pytest.mark.parametrize(("ranks", "vocab"), [(2, 40), (4, 61)])
def test_drafts_of_candidates_are_decided_as_by_one_rank(ranks: int, vocab: int) -> None:
    calls = sparse_calls(vocab, 12)
    check(ranks, calls)
    for call in calls:
        assert call.one_rank().status[3] == call.one_rank().status[6] == 2, call.name


def test_ranks_leave_out_requests_that_are_not_active() -> None:
    batch = 12
    active = torch.arange(batch) % 3 != 1
    calls = []
    for call in [
        *calls_with("none", batch=batch)[::4],
        *ratio_calls(40, batch, "top_p"),
        *sample_calls(40, batch, "all", 0),
        *logprob_calls(40, batch, "all")[1:2],
        *residual_calls(40, batch, "none"),
    ]:
        sharded = {name: rows.clone() for name, rows in call.sharded.items()}
        for rows in sharded.values():
            if len(rows) == batch:
                rows[~active] = torch.nan
        if len(call.keywords["sampling"].temperature) == batch:
            sampling = call.keywords["sampling"]._replace(active=active)
            calls.append(call._replace(sharded=sharded, keywords={**call.keywords, "sampling": sampling}))
    functions = {verify_chain, verify_tree, acceptance_ratios, sample, token_logprobs, residual_sample, whole_probs}
    assert {call.function for call in calls} == functions
    check(2, calls)
    for call in calls:
        status = call.one_rank().status
        assert not status[~active].any(), call.name


def test_steps_without_a_request_or_without_a_draft_are_sent_too() -> None:
    rows, ids = torch.randn(3, 1, 40), torch.zeros(3, 0, dtype=torch.int64)
    keywords = {"draft_ids": ids, "sampling": Sampling()}
    bare = Call("no drafts", acceptance_ratios, {"target_logits": rows}, keywords, 40, 2)
    check(2, [bare, mapped_call(40, 0, "none"), mapped_call(40, 0, "all")])


def test_every_node_with_two_children_gets_its_mass() -> None:
    """All inner nodes at once: the third of them must not be left out."""
    call = wide_call(10, 400, 0)
    assert int((call.one_rank().path[:, 2] == 6).sum()) > 10  # the last one's second child, after its first
    check(2, [call])


def test_a_map_to_another_ranks_ids_drafts_nothing() -> None:
    call = mapped_call(40, 12, "none")
    assert call.token_map is not None
    # Ids in falling order: every rank holds columns whose ids are not its own.
    token_map = torch.arange(40).flip(0).int()
    target, draft = call.sharded["target_logits"], torch.zeros(12, 3, 40)
    sharded = {"target_logits": target, "draft_logits": draft, "token_map": token_map}
    for answer in run_on_ranks(2, [call._replace(sharded=sharded, token_map=None)]):
        _, accepted, status, *_ = answer[0].results
        assert (accepted == 0).all()
        assert (status == 2).all()


@pytest.mark.parametrize("ranks", [2, 8])
def test_without_filters_a_rank_sends_at_most_64_bytes_a_row(ranks: int) -> None:
    """Counted in the collective. Rules that take an exchange a sibling are held to the same."""
    calls = [c for c in calls_with("none") if not c.name.startswith("sample")]
    for call, reply in zip(calls, run_on_ranks(ranks, calls)[0], strict=True):
        allowed = BYTES_A_ROW * call.rows
        assert reply.sent <= allowed, f"{call.name}: {reply.sent / call.rows:.1f} bytes a row"


def next_floats(x: Tensor, steps: int) -> Tensor:
    """Positive float32 numbers, some steps further."""
    return (x.view(torch.int32) + steps).view(torch.float32)


def coin_edges(batch: int, vocab: int) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A chain of one draft each whose p(x) lies where one rank begins to accept: (keywords, rows, logit of x)."""
    g = torch.Generator().manual_seed(5)
    rows, draft = torch.randn(batch, 2, vocab, generator=g), torch.zeros(batch, 1, vocab)
    draft[:, :, vocab // 2] = 3.0
    rng = make_rng(batch)
    keywords: dict[str, Any] = {
        "draft_ids": torch.full((batch, 1), vocab // 2),
        "draft_logits": draft,
        "sampling": Sampling(),
        "draft_sampling": Sampling(),
        "rng": rng,
    }
    low, high = torch.full((batch,), 1e-3), torch.full((batch,), 30.0)
    for _ in range(40):  # bisection down to neighbouring float32 logits
        middle = ((low.view(torch.int32).long() + high.view(torch.int32).long()) // 2).int().view(torch.float32)
        rows[:, 0, vocab // 2] = middle
        accepts = verify_chain(target_logits=rows, backend="reference", **keywords).num_accepted == 1
        low, high = torch.where(accepts, low, middle), torch.where(accepts, middle, high)
    # A coin so small that even the smallest logit tried is accepted has no edge here.
    assert (high > 2e-3).sum() > batch // 2
    return keywords, rows, high


def test_a_decision_moves_by_no_more_than_one_neighbouring_logit() -> None:
    """How close to one rank: where p(x) crosses the coin, the shards cross at the same float32 logit, or the next."""
    batch, vocab = 64, 40
    keywords, rows, edge = coin_edges(batch, vocab)
    calls = []
    for steps in (-2, -1, 0, 1):
        moved = rows.clone()
        moved[:, 0, vocab // 2] = next_floats(edge, steps)
        sharded = {"target_logits": moved, "draft_logits": keywords["draft_logits"]}
        rest = {k: v for k, v in keywords.items() if k != "draft_logits"}
        calls.append(Call(f"edge {steps}", verify_chain, sharded, rest, vocab, 2))
    accepted = [reply.results[1] for reply in run_on_ranks(2, calls)[0]]
    has_edge = (edge > 2e-3) & (edge < 29)
    assert accepted[0] is not None and accepted[3] is not None
    assert (accepted[0][has_edge] == 0).all()
    assert (accepted[3][has_edge] == 1).all()


class Group:
    """Interface of a process group."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    keywords: dict[str, Any] = {"sampling": Sampling(), "rng": make_rng(2), "purpose": "target"}
    rows = torch.zeros(2, 5)
    for offsets in (None, [0, 5], [0, 5, 5], [1, 5, 9], [0, 6, 5]):
        with pytest.raises(ValueError, match="sample: vocab_offsets must be 3 rising ints from 0"):
            sample(rows, group=Group(2), vocab_offsets=offsets, **keywords)
    with pytest.raises(ValueError, match=r"sample: group must be a process group of torch.distributed, got 'world'"):
        sample(rows, group="world", vocab_offsets=[0, 5], **keywords)
    with pytest.raises(ValueError, match=r"sample: logits must be \[..., 4\] on rank 0 by vocab_offsets"):
        sample(rows, group=Group(2), vocab_offsets=[0, 4, 9], **keywords)
    with pytest.raises(ValueError, match="sample: backend must be None with a group"):
        sample(rows, group=Group(2), vocab_offsets=[0, 5, 9], backend="cpu", **keywords)
    with use_backend("cpu"), pytest.raises(ValueError, match="sample: backend must be None with a group"):
        sample(rows, group=Group(2), vocab_offsets=[0, 5, 9], **keywords)
    with pytest.raises(ValueError, match="sample: vocab_offsets must be None without a group"):
        sample(rows, vocab_offsets=[0, 5], **keywords)
    del keywords["purpose"]
    ids, parents = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[-1, 0], [-1, 0]])
    with pytest.raises(ValueError, match="verify_tree: max_children must be None but for rule 'recursive'"):
        verify_tree(ids, parents, torch.zeros(2, 2, 5), max_depth=1, rule="recursive", max_children=1, **keywords)
