"""verify_tree: examples by hand, chains against verify_chain, invariances, edges, wrong arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import FILTERS, make_chain, make_rng
from check import assert_same, of_the_reference
from exact_trees import medusa_typical
from tree_cases import TREE_RULES, TreeCase, make_tree

from specdec_kernels import (
    ChainResult,
    RngKey,
    Sampling,
    TreeResult,
    random_words,
    sample,
    tree_layout,
    verify_chain,
    verify_tree,
)
from specdec_kernels.ops.verify_tree import op

NAMES = TreeResult._fields
INF, NAN = float("inf"), float("nan")


def run(case: TreeCase, **more: Any) -> TreeResult:
    return verify_tree(*case.tensors, **{**case.keywords, **more})


def compare(case: TreeCase, device: str, **more: Any) -> TreeResult:
    """Decisions of the current backend against the reference's."""
    ours = run(case.to(device), **more)
    theirs = of_the_reference(ours, lambda: run(case, **more))
    cpu = [None if t is None else t.cpu() for t in ours]
    assert_same(tuple(cpu[:4]), tuple(theirs[:4]), NAMES[:4])
    if theirs.logprobs is not None:
        assert cpu[4] is not None
        torch.testing.assert_close(cpu[4], theirs.logprobs, rtol=1e-5, atol=2e-5, equal_nan=True)
    return theirs


def one(
    ids: list[int], parents: list[int], target: list[list[float]], draft: list[list[float]] | None = None,
    *, device: str = "cpu", max_depth: int = 3, **keywords: Any,
) -> tuple[list[int], list[int], int, int]:  # fmt: skip
    """Verify one request given plain numbers: (token_ids, path, num_accepted, status)."""
    rng = keywords.pop("rng", RngKey(*(torch.tensor([v], device=device) for v in (7, 5, 0))))
    result = verify_tree(
        torch.tensor([ids], device=device),
        torch.tensor([parents], device=device),
        torch.tensor([target], device=device),
        None if draft is None else torch.tensor([draft], device=device),
        max_depth=max_depth,
        sampling=keywords.pop("sampling", Sampling()),
        draft_sampling=None if draft is None else Sampling(),
        rng=rng,
        **keywords,
    )
    return (
        [t for t in result.token_ids[0].tolist() if t != -1],
        [n for n in result.path[0].tolist() if n != -1],
        int(result.num_accepted),
        int(result.status),
    )


# --- examples one can check by hand

PARENTS = [-1, 0, 0, 1, 2, 2]
IDS = [9, 1, 2, 0, 0, 3]


def rows(*favourites: int, height: float = 30.0) -> list[list[float]]:
    return [[height if v == favourite else 0.0 for v in range(4)] for favourite in favourites]


@pytest.mark.parametrize("rule", TREE_RULES)
def test_peaked_rows_lead_every_rule_down_the_same_path(backend: str, device: str, rule: str) -> None:
    common = {"rule": rule, "device": device}
    assert one(IDS, PARENTS, rows(2, 0, 3, 0, 0, 1), **common) == ([2, 3, 1], [2, 5], 2, 0)
    assert one(IDS, PARENTS, rows(1, 0, 3, 2, 0, 1), **common) == ([1, 0, 2], [1, 3], 2, 0)
    assert one(IDS, PARENTS, rows(2, 0, 1, 0, 0, 1), **common) == ([2, 1], [2], 1, 0)
    assert one(IDS, PARENTS, rows(3, 0, 1, 0, 0, 1), **common) == ([3], [], 0, 0)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_root_alone_draws_one_token(backend: str, device: str, rule: str) -> None:
    assert one([5], [-1], rows(2), rule=rule, device=device, max_depth=0) == ([2], [], 0, 0)
    assert one([5, 1, 2], [-1, -1, -1], rows(2, 0, 0), rule=rule, device=device) == ([2], [], 0, 0)
    assert one([5, -1, 2], [-1, 0, 1], rows(2, 0, 0), rule=rule, device=device) == ([2], [], 0, 0)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_an_empty_batch_gives_empty_results(backend: str, device: str, rule: str) -> None:
    result = run(make_tree(1, 5, 7, rule=rule).to(device).pick(torch.zeros(0, dtype=torch.int64, device=device)))
    assert [list(t.shape) for t in result if t is not None] == [[0, 5], [0, 5], [0], [0]]


def test_match_emits_plain_seeded_sampling_whatever_the_tree(backend: str, device: str) -> None:
    """The text is that of token-by-token sampling with purpose target; a tree only saves steps."""
    vocab = 5
    case = make_tree(200, 12, vocab, rule="match", filters="temperature", seed=3).to(device)
    first = case.target_logits[:, 0]
    result = run(replace(case, target_logits=first[:, None].expand(-1, 12, -1)))
    rng = case.keywords["rng"]
    for i in range(5):
        plain = sample(
            first,
            sampling=case.keywords["sampling"],
            rng=rng._replace(position=rng.position + i),
            purpose="target",
        )
        emitted = result.token_ids[:, i]
        assert torch.equal(emitted[emitted >= 0], plain.token_ids[emitted >= 0, 0])
    assert len(set(result.num_accepted.tolist())) > 2


def test_typical_takes_medusas_path(backend: str, device: str) -> None:
    batch = 40
    case = make_tree(batch, 14, 30, rule="typical", drafts="point", ragged=True, closeness=0.3)
    result = compare(case, device, typical_epsilon=0.05, typical_delta=0.2)
    leaves = tree_layout(case.parents, backend="reference").leaf_paths
    for b in range(batch):
        p = case.target_logits[b].double().softmax(-1)
        path, accepted = medusa_typical(p, case.token_ids[b], leaves[b], 0.05, 0.2)
        assert (result.path[b, :accepted].tolist(), int(result.num_accepted[b])) == (path, accepted)
    assert len(set(result.num_accepted.tolist())) > 2


def test_typical_prefers_the_likelier_of_equal_lengths(backend: str, device: str) -> None:
    target = [[2.0, 1.9, 0.0, 0.0]] + [[0.0] * 4] * 2
    assert one([9, 1, 0], [-1, 0, 0], target, rule="typical", device=device)[1] == [2]
    assert one([9, 0, 1], [-1, 0, 0], target, rule="typical", device=device)[1] == [1]
    flat = [[0.0] * 4] * 3
    assert one([9, 3, 1], [-1, 0, 0], flat, rule="typical", typical_delta=0.9, device=device)[1] == [1]


def test_a_candidate_that_repeats_is_rejected_with_replacement(backend: str, device: str) -> None:
    """After x was rejected nothing is left of p at x: a second draw of x never passes."""
    target, draft = [[0.0, 0.0]] * 3, [[3.0, 0.0]] * 3
    for seed in range(40):
        rng = RngKey(*(torch.tensor([v], device=device) for v in (seed, 5, 0)))
        common = {"rule": "recursive", "replacement": True, "device": device, "rng": rng}
        tokens, path, _, status = one([9, 0, 0], [-1, 0, 0], target, draft, **common)
        assert status == 0 and path in ([1], []) and (path == [1] or tokens == [1])


def test_a_third_child_is_tried_against_what_one_rejection_left(backend: str, device: str) -> None:
    """Point masses 0, 0, 1 under the root: the second 0 takes nothing more from p, so u Z < p(1) with Z = 1 - p(0)."""
    batch, index = 400, torch.arange(3)
    p = torch.tensor([0.4, 0.2, 0.3, 0.1])
    rng = RngKey(torch.arange(batch), torch.full((batch,), 5), torch.zeros(batch, dtype=torch.int64))
    u = (random_words(rng, purpose="coin", index=index) >> 8).double() * 2.0**-24
    want = torch.where(u[:, 0] < 0.4, 1, torch.where(u[:, 2] * 0.6 < 0.2, 3, -1))
    ids, parents = (torch.tensor([row] * batch, device=device) for row in ([9, 0, 0, 1], [-1, 0, 0, 0]))
    result = verify_tree(
        ids, parents, p.log().to(device).expand(batch, 4, 4), max_depth=1, sampling=Sampling(),
        rng=RngKey(*(part.to(device) for part in rng)), rule="recursive", replacement=True,
    )  # fmt: skip
    assert torch.equal(result.path[:, 0].cpu(), want.int())
    drawn = result.token_ids[:, 0].cpu()[want == -1]
    assert len(drawn) > 50 and bool((drawn >= 2).all())  # nothing is left of 0 and 1


@pytest.mark.parametrize(
    ("rule", "replacement"),
    [("recursive", False), ("recursive", True), ("greedy_multi_draft", False), ("traversal", False)],
)
def test_siblings_behind_two_rejections(backend: str, device: str, rule: str, replacement: bool) -> None:
    """Four drawn siblings, mostly rejected: what a rejection leaves is divided by what the draft has left."""
    batch, vocab, g = 40, 9, torch.Generator().manual_seed(5)
    target, draft = (2 * torch.randn(batch, 5, vocab, generator=g) for _ in range(2))
    drawn = draft[:, 0].softmax(-1).multinomial(4, replacement, generator=g)
    ids = torch.cat([torch.full((batch, 1), 8), drawn], 1)
    keywords = {"sampling": Sampling(), "draft_sampling": Sampling(), "rng": make_rng(batch), "max_depth": 1}
    case = TreeCase(ids, torch.tensor([[-1, 0, 0, 0, 0]] * batch), target, draft, keywords)
    path = compare(case, device, rule=rule, replacement=replacement).path[:, 0]
    assert int((path == -1).sum()) > batch // 10
    assert int((path >= 3).sum()) > (0 if rule == "traversal" else batch // 20)


# --- a chain is a tree

CHAIN_RULES = [
    ("ratio", "recursive", "model"),
    ("ratio", "greedy_multi_draft", "model"),
    ("ratio", "target_only", "point"),
    ("ratio", "recursive", "point"),
    ("block", "traversal", "model"),
    ("block", "traversal", "point"),
    ("match", "match", "point"),
    ("greedy", "greedy", "point"),
    ("typical", "typical", "point"),
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("chain_rule", "rule", "drafts"), CHAIN_RULES)
def test_a_chain_given_as_a_tree_equals_verify_chain(
    backend: str, device: str, chain_rule: str, rule: str, drafts: str, filters: str
) -> None:
    is_interpreted = backend == "triton" and device == "cpu"
    batch, draft, vocab = 5 if is_interpreted else 150, 3, 23
    chain = make_chain(
        batch, draft, vocab, rule=chain_rule, filters=filters, drafts=drafts, ragged=True, greedy_every=4
    ).to(device)
    keywords = {**chain.keywords, "logprobs": "processed"}
    want: ChainResult = verify_chain(chain.draft_ids, chain.target_logits, chain.draft_logits, **keywords)
    ids = torch.nn.functional.pad(chain.draft_ids, (1, 0), value=-1)
    parents = (torch.arange(draft + 1, device=device) - 1).repeat(batch, 1)
    logits = None
    if chain.draft_logits is not None:
        logits = torch.nn.functional.pad(chain.draft_logits, (0, 0, 0, 1), value=NAN)
    keywords |= {"rule": rule, "max_depth": draft}
    for tree in (parents, torch.where(ids == -1, -1, parents)):
        found = verify_tree(ids, tree, chain.target_logits, logits, **keywords)
        ours = (found.token_ids, found.num_accepted, found.status, found.logprobs)
        assert_same(ours, tuple(want)[:4], ChainResult._fields[:4])
        depth = torch.arange(draft + 1, device=device)
        assert torch.equal(found.path, torch.where(depth < found.num_accepted[:, None], depth + 1, -1).int())


# --- the reference's decisions, and what they may not depend on


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_decisions_equal_the_reference(backend: str, device: str, is_slow: bool, rule: str, filters: str) -> None:
    batch = 8 if is_slow else 30
    for drafts in ("model", "point"):
        case = make_tree(batch, 11, 61, rule=rule, filters=filters, drafts=drafts, ragged=True, greedy_every=4)
        result = compare(case, device, logprobs="processed")
        assert int(result.status.max()) & ~(8 | 16) == 0  # the case's drafts know no filters
        assert int(result.num_accepted.max()) > 0


@pytest.mark.parametrize("rule", TREE_RULES)
def test_result_does_not_depend_on_slot_or_padding(backend: str, device: str, rule: str) -> None:
    batch, nodes = 6, 9
    case = make_tree(batch, nodes, 40, rule=rule, filters="all", ragged=True).to(device)
    whole = run(case, logprobs="processed")
    for order in ([3], [5, 0], [5, 4, 3, 2, 1, 0]):
        part = case.pick(torch.tensor(order, device=device))
        for extra in (0, 3):
            pad = torch.nn.functional.pad
            assert part.draft_logits is not None
            wider = TreeCase(
                pad(part.token_ids, (0, extra), value=-1),
                pad(part.parents, (0, extra), value=-1),
                pad(part.target_logits, (0, 0, 0, extra), value=NAN),
                pad(part.draft_logits, (0, 0, 0, extra), value=NAN),
                part.keywords,
            )
            found = run(wider, logprobs="processed")
            assert_same(tuple(found), tuple(None if t is None else t[order] for t in whole), NAMES)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_greedy_request_is_greedy_under_every_rule(backend: str, device: str, rule: str) -> None:
    case = make_tree(40, 11, 9, drafts="model", ragged=True, closeness=1.5).to(device)
    greedy = {"sampling": Sampling.full(40, temperature=0.0, device=device)}
    assert_same(tuple(run(case, rule=rule, **greedy)), tuple(run(case, rule="greedy")), NAMES)


def test_a_thousand_and_twenty_four_nodes(backend: str, device: str) -> None:
    for depth in (5, 1023):
        parents = torch.arange(1024) - 1 if depth == 1023 else (torch.arange(1024) - 1) // 5
        tokens = torch.arange(1024) % 5 if depth == 1023 else (torch.arange(1024) - 1) % 5
        logits = torch.zeros(1, 1024, 5)
        logits[0, torch.arange(1024), torch.arange(1, 1025) % 5] = 50.0
        if depth == 5:
            logits[:] = torch.tensor([0.0, 0, 0, 50, 0])
        result = verify_tree(
            tokens[None].to(device), parents[None].to(device), logits.to(device), max_depth=depth,
            sampling=Sampling(), rng=RngKey(*(t.to(device) for t in make_rng(1))), rule="recursive",
        )  # fmt: skip
        accepted = 1023 if depth == 1023 else 4
        assert int(result.num_accepted) == accepted and int(result.status) == 0
        assert int((result.token_ids >= 0).sum()) == accepted + 1


@pytest.mark.parametrize("filters", ["none", "top_p", "min_p"])
def test_several_tiles(backend: str, device: str, is_slow: bool, filters: str) -> None:
    for rule in ("match", "typical", "recursive"):
        compare(make_tree(2 if is_slow else 20, 4, 9999, rule=rule, filters=filters), device)


@pytest.mark.parametrize("rule", [rule for rule in TREE_RULES if rule != "traversal"])
def test_a_wide_tree_is_read_level_by_level(backend: str, device: str, rule: str) -> None:
    """So large that reading the rows of all nodes first would cost more than another round of kernels."""
    is_interpreted = backend == "triton" and device == "cpu"
    case = make_tree(2 if is_interpreted else 48, 32, 7500, max_depth=1, rule=rule)
    result = compare(case, device, **({"typical_epsilon": 1e-4} if rule == "typical" else {}))
    assert is_interpreted or int(result.num_accepted.max()) == 1


def test_masks_and_reduced_vocabularies_mean_what_they_say(backend: str, device: str) -> None:
    """`allowed` equals logits of -inf; `token_map` equals draft rows scattered to the target's vocabulary."""
    batch, nodes, vocab = 20, 9, 37
    case = make_tree(batch, nodes, vocab, filters="all", seed=4).to(device)
    bits = torch.randint(0, 2, (batch * nodes, vocab), device=device).bool()
    weights = 2 ** torch.arange(32, device=device)
    padded = torch.nn.functional.pad(bits, (0, 64 - vocab)).unflatten(1, (2, 32)).long()
    packed = (padded * weights).sum(2)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    masked = torch.where(bits.view(batch, nodes, vocab), case.target_logits, -INF)
    assert_same(tuple(run(case, allowed=packed)), tuple(run(replace(case, target_logits=masked))), NAMES)

    assert case.draft_logits is not None
    token_map = torch.randperm(vocab)[:20].to(device)
    small = case.draft_logits[..., token_map].contiguous()
    full = torch.full_like(case.draft_logits, -INF)
    full[..., token_map] = small
    for rule in ("recursive", "greedy_multi_draft", "traversal"):
        reduced = run(replace(case, draft_logits=small), rule=rule, token_map=token_map.int())
        assert_same(tuple(reduced), tuple(run(replace(case, draft_logits=full), rule=rule)), NAMES)


# --- bad input harms nobody else

MALFORMED = {
    "cycle": [-1, 2, 1, 0, 0],
    "its own parent": [-1, 1, 0, 0, 0],
    "parent after child": [-1, 3, 0, 0, 0],
    "out of range": [-1, 0, 99, 0, 0],
    "below -1": [-1, 0, -2, 0, 0],
    "no root": [0, 0, 0, 0, 0],
    "parent is padding": [-1, -1, 1, 0, 0],
    "too deep": [-1, 0, 1, 2, 3],
}


@pytest.mark.parametrize("fault", MALFORMED)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_malformed_tree_is_flagged_and_counts_as_its_root(backend: str, device: str, rule: str, fault: str) -> None:
    case = make_tree(3, 5, 12, max_depth=3, rule=rule).to(device)
    clean = run(case)
    case.parents[1] = torch.tensor(MALFORMED[fault])
    result = run(case)
    assert result.status.tolist() == [0, 32, 0]
    assert_same(tuple(t[[0, 2]] for t in result[:4]), tuple(t[[0, 2]] for t in clean[:4]), NAMES[:4])
    case.parents[1, :] = -1
    alone = run(case)
    assert_same(tuple(t[1] for t in result[:3]), tuple(t[1] for t in alone[:3]), NAMES[:3])
    assert int(result.num_accepted[1]) == 0 and int(result.token_ids[1, 0]) >= 0


@pytest.mark.parametrize("rule", TREE_RULES)
def test_equal_siblings_are_refused_except_with_replacement(backend: str, device: str, rule: str) -> None:
    case = make_tree(2, 5, 12, rule=rule).to(device)
    case.parents[:] = torch.tensor([-1, 0, 0, 1, 2])
    case.token_ids[1] = torch.tensor([-1, 4, 4, 4, 4])
    assert run(case).status.tolist() == [0, 32]
    if rule == "recursive":
        assert run(case, replacement=True).status.tolist() == [0, 0]


@pytest.mark.parametrize("rule", TREE_RULES)
def test_bad_rows_and_ids_are_flagged(backend: str, device: str, rule: str) -> None:
    common = {"rule": rule, "device": device}
    nan, none = [NAN] * 4, [-INF] * 4
    good = rows(2, 0, 3, 0, 0, 1)
    assert one(IDS, PARENTS, [nan, *good[1:]], **common) == ([], [], 0, 1)
    assert one(IDS, PARENTS, [*good[:5], none], **common) == ([2, 3], [2, 5], 2, 1)
    assert one([9, 1, 2, 0, 0, 7], PARENTS, good, **common) == ([2, 3], [2], 1, 4)
    assert one([9, 1, -5, 0, 0, 3], PARENTS, good, **common) == ([2], [], 0, 4)
    if rule in ("recursive", "greedy_multi_draft", "traversal"):
        draft = [[0.0] * 4] * 2 + [nan] + [[0.0] * 4] * 3
        assert one(IDS, PARENTS, good, draft, **common) == ([2, 3], [2], 1, 2)
    # What hangs on another branch is not looked at by the rules that walk.
    tokens, path, _, status = one(IDS, PARENTS, [good[0], nan, *good[2:]], **common)
    assert (tokens, path) == ([2, 3, 1], [2, 5]) and status == int(rule == "traversal")


def test_a_bad_temperature_makes_that_request_greedy(backend: str, device: str) -> None:
    case = make_tree(4, 9, 20).to(device)
    temperature = torch.tensor([1.0, NAN, -1.0, 1.0], device=device)
    result = run(case, sampling=Sampling(temperature))
    assert result.status.tolist() == [0, 64, 64, 0]
    greedy = run(case, rule="greedy")
    assert torch.equal(result.token_ids[1:3], greedy.token_ids[1:3])


@pytest.mark.parametrize("rule", ["recursive", "greedy_multi_draft", "traversal"])
def test_a_bad_draft_temperature_is_flagged_only_where_the_root_has_a_candidate(
    backend: str, device: str, rule: str
) -> None:
    case = make_tree(4, 5, 20, rule=rule).to(device)
    case.parents[1, 1:] = -1
    case.token_ids[2] = -1
    case.parents[3, 1] = 3  # malformed: its root alone
    result = run(case, draft_sampling=Sampling(torch.full((4,), NAN, device=device)))
    assert result.status.tolist() == [64, 0, 0, 32]


@pytest.mark.parametrize("rule", ["match", "recursive", "greedy"])
def test_raw_logprobs_are_the_softmax_of_all_logits(backend: str, device: str, rule: str) -> None:
    """At temperature 1, where raw and processed differ by `allowed` alone."""
    case = make_tree(6, 5, 31, rule=rule)
    case.keywords["sampling"] = Sampling()
    case.keywords["allowed"] = torch.randint(2**31, (30, 1), generator=torch.Generator().manual_seed(3)).int()
    result = run(case.to(device), logprobs="raw")
    assert result.logprobs is not None
    tokens, path = result.token_ids.cpu(), result.path.cpu().long()
    rows = torch.nn.functional.pad(path, (1, 0))[:, :-1].clamp(min=0)
    want = case.target_logits.log_softmax(-1)[torch.arange(6)[:, None], rows].gather(2, tokens.clamp(min=0)[..., None])
    torch.testing.assert_close(result.logprobs.cpu(), torch.where(tokens >= 0, want[..., 0], 0.0), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_raw_logprobs_of_a_row_with_a_bad_logit_at_a_disallowed_id_are_nan(
    backend: str, device: str, bad: float
) -> None:
    case = make_tree(3, 5, 40, rule="match").to(device)
    case.target_logits[1, :, 9] = bad
    case.keywords["allowed"] = torch.full((15, 2), -1, dtype=torch.int32, device=device)
    case.keywords["allowed"][5:10, 0] = ~(1 << 9)  # the rows of request 1, without id 9
    result = run(case, logprobs="raw")
    assert result.logprobs is not None and not result.status.any()
    is_second = torch.arange(3, device=device)[:, None] == 1
    assert torch.equal(result.logprobs.isnan(), (result.token_ids >= 0) & is_second)


def test_zero_draft_probability_is_rejected_and_flagged(backend: str, device: str) -> None:
    draft = [[-INF, 0.0, 0.0, 0.0]] * 3
    for rule in ("recursive", "greedy_multi_draft", "traversal"):
        tokens, path, _, status = one([9, 0], [-1, 0], rows(0, 1), draft[:2], rule=rule, device=device)
        assert (tokens, path, status) == ([0], [], 16)


# --- the calling conventions


def test_ids_come_back_in_the_dtype_they_came_and_out_receives_them(backend: str, device: str) -> None:
    case = make_tree(5, 7, 30, ragged=True).to(device)
    want = run(case, logprobs="raw")
    narrow = run(replace(case, token_ids=case.token_ids.int(), parents=case.parents.long()))
    assert narrow.token_ids.dtype == torch.int32 and torch.equal(narrow.token_ids.long(), want.token_ids)
    out = TreeResult(*(torch.full_like(t, 99) for t in want if t is not None))  # type: ignore[type-var]
    got = run(case, logprobs="raw", out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(tuple(got), tuple(want), NAMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": [[-1]]}, "parents must be a tensor of int32 or int64, got list"),
        ({"parents": torch.zeros(3, 0).int()}, r"parents must be \[batch, nodes\] with 1 \(the root\) to 1024 nodes"),
        ({"parents": torch.zeros(3, 1025).int()}, r"parents must be \[batch, nodes\] with 1 \(the root\) to 1024"),
        ({"token_ids": torch.zeros(3, 4).long()}, r"token_ids must be \[3, 5\], got \[3, 4\]"),
        ({"target_logits": torch.zeros(3, 4, 9)}, r"target_logits must be \[3, 5, vocab\], got \[3, 4, 9\]"),
        ({"draft_logits": torch.zeros(3, 4, 9)}, r"draft_logits must be \[3, 5, draft_vocab\], got \[3, 4, 9\]"),
        ({"draft_sampling": None}, "draft_sampling must be given with draft_logits"),
        ({"max_depth": None}, "max_depth must be a host int >= 0, got None"),
        ({"max_depth": 2**62}, r"max_depth must be a host int < 2\^40, got 4611686018427387904"),
        ({"rule": "ratio"}, "rule must be one of 'match', 'greedy', 'typical', 'recursive'"),
        ({"rule": "match", "replacement": True}, "replacement must be False unless the rule is 'recursive'"),
        (
            {"rule": "traversal", "rng": RngKey(torch.zeros(3).long(), torch.zeros(3).long())},
            "rng.step must be given for rule 'traversal'",
        ),
        ({"allowed": torch.zeros(15, 2).int()}, r"allowed must be \[15, 1\], got \[15, 2\]"),
        ({"draft_logits": torch.zeros(3, 5, 7)}, r"token_map must be given where draft_vocab \(7\) is not vocab \(9\)"),
        (
            {"typical_epsilon": float("nan")},
            r"typical_epsilon must be a number in \[0, inf\] or float32 \[batch\], got nan",
        ),
        ({"out": 5}, "out must be a TreeResult, got int"),
        ({"logprobs": "all"}, "logprobs must be one of None, 'processed', 'raw'"),
        ({"backend": "numpy"}, "backend must be one of reference"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    case = make_tree(3, 5, 9)
    names = ("token_ids", "parents", "target_logits", "draft_logits")
    arguments = {**dict(zip(names, case.tensors, strict=True)), **case.keywords, **change}
    with pytest.raises(ValueError, match="verify_tree: " + message):
        verify_tree(*[arguments.pop(name) for name in names], **arguments)


def test_traversal_takes_at_most_64_nodes() -> None:
    with pytest.raises(ValueError, match="verify_tree: parents must be of at most 64 nodes for rule 'traversal'"):
        run(make_tree(1, 65, 5, rule="traversal"))
    assert op.name == "verify_tree"
