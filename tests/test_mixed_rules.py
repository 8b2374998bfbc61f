"""A rule, and its numbers, for each request of a batch: each gets what they give it alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import make_chain
from check import assert_same
from op_calls import moved
from sparse_cases import sparse_chain, sparse_tree
from torch import Tensor
from tree_cases import make_tree

from specdec_kernels import ChainResult, MixedRules, RngKey, Sampling, Status, verify_chain, verify_tree

BATCH, VOCAB = 6, 41
CHAIN = ("ratio", "greedy", "match", "block")
TREE = ("match", "recursive", "greedy", "typical")
CHOICE = torch.tensor([2, 0, 1, 3, 0, 2], dtype=torch.int32)


def chain(**how: Any) -> dict[str, Any]:
    case = make_chain(BATCH, 3, VOCAB, ragged=True, filters="top_k", **how)
    rows = {"draft_ids": case.draft_ids, "target_logits": case.target_logits, "draft_logits": case.draft_logits}
    return {**rows, **case.keywords, "logprobs": "raw"}


def tree() -> dict[str, Any]:
    case = make_tree(BATCH, 7, VOCAB, rule="recursive")
    names = ("token_ids", "parents", "target_logits", "draft_logits")
    return {**dict(zip(names, case.tensors, strict=True)), **case.keywords, "logprobs": "processed"}


def expect(op: Any, given: dict[str, Any], rules: tuple[str, ...], device: str, is_slow: bool) -> None:
    """Request b of the mixed call is request b of a call in which all have its rule; two rules where slow."""
    given, rules = moved(given, device), rules[:2] if is_slow else rules
    choice = (CHOICE % len(rules)).to(device)
    whole = op(**{**given, "rule": MixedRules(rules, choice)})
    for i, rule in enumerate(rules):
        alone = op(**{**given, "rule": rule})
        mine = choice == i
        for field, ours, theirs in zip(whole._fields, whole, alone, strict=True):
            if ours is None:
                assert theirs is None
                continue
            assert_same((ours[mine],), (theirs[mine],), (field,))


@pytest.mark.parametrize("flat", [False, True], ids=["dense", "flat"])
def test_requests_of_a_chain_get_what_their_rules_give(backend: str, device: str, is_slow: bool, flat: bool) -> None:
    expect(verify_chain, chain(flat=flat), CHAIN, device, is_slow)


def test_a_compiled_call_guards_on_no_size_of_its_results() -> None:
    """max_draft and the batch are symbols here; whether their product is 0 is no question that Dynamo answers."""
    given = {**chain(flat=True), "rule": MixedRules(("match", "greedy"), CHOICE % 2), "backend": "cpu", "top": 0}
    compiled = torch.compile(lambda more: verify_chain(**more), backend="eager", fullgraph=True, dynamic=True)
    for ours, theirs, name in zip(compiled(given), verify_chain(**given), ChainResult._fields, strict=True):
        assert_same((ours,), (theirs,), (name,))


def test_requests_of_trees_get_what_their_rules_give(backend: str, device: str, is_slow: bool) -> None:
    expect(verify_tree, tree(), TREE, device, is_slow)


def test_drafts_of_candidates_are_read_by_the_rules_that_read_drafts(backend: str, device: str, is_slow: bool) -> None:
    case = make_chain(BATCH, 3, VOCAB, ragged=True, filters="temperature")
    rows = {"draft_ids": case.draft_ids, "target_logits": case.target_logits, "draft_logits": sparse_chain(case, 7)}
    expect(verify_chain, {**rows, **case.keywords}, CHAIN, device, is_slow)
    nodes = make_tree(BATCH, 7, VOCAB, rule="recursive", filters="temperature")
    names = ("token_ids", "parents", "target_logits")
    rows = {**dict(zip(names, nodes.tensors, strict=False)), "draft_logits": sparse_tree(nodes, 12)}
    expect(verify_tree, {**rows, **nodes.keywords}, TREE, device, is_slow)


def test_options_are_those_of_their_own_rule(backend: str, device: str) -> None:
    given = moved(chain(closeness=2.0), device)
    rule = MixedRules(("match", "ratio"), torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.int32, device=device))
    lossy = verify_chain(**{**given, "rule": rule, "over_acceptance": 1.0})
    exact = verify_chain(**{**given, "rule": rule})
    assert torch.equal(lossy.token_ids[::2], exact.token_ids[::2])
    drafted = (given["draft_ids"] >= 0).sum(1)
    assert torch.equal(lossy.num_accepted[1::2], drafted[1::2].int())
    assert bool((exact.num_accepted[1::2] < drafted[1::2]).any())


def test_a_request_without_a_rule_is_flagged_and_emits_nothing(backend: str, device: str) -> None:
    given = moved(chain(), device)
    choice = torch.tensor([0, 1, 2, -1, 0, 7], dtype=torch.int32, device=device)
    active = torch.tensor([True] * 5 + [False], device=device)
    sampling = given["sampling"]._replace(active=active)
    got = verify_chain(**{**given, "rule": MixedRules(("match", "greedy", "ratio"), choice), "sampling": sampling})
    assert got.status.tolist() == [0, 0, 0, int(Status.BAD_SAMPLING), 0, 0]
    assert got.num_accepted[3] == 0
    assert bool((got.token_ids[3] == -1).all())
    assert bool((got.token_ids[5] == -1).all())


def test_results_given_are_written(backend: str, device: str) -> None:
    given = moved(chain(), device)
    rule = MixedRules(CHAIN[:2], (CHOICE % 2).to(device))
    want = verify_chain(**{**given, "rule": rule})
    out = ChainResult(*(torch.full_like(x, 7) for x in want if x is not None))
    got = verify_chain(**{**given, "rule": rule, "out": out})
    assert all(ours is theirs for ours, theirs in zip(got, out, strict=True))
    assert_same(got, want, want._fields)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (MixedRules((), CHOICE), "verify_chain: rule.rules must be a tuple of names of rules, got ()"),
        (MixedRules("ratio", CHOICE), "verify_chain: rule.rules must be a tuple of names of rules, got 'ratio'"),
        (MixedRules(("match", "match"), CHOICE), "verify_chain: rule.rules must be names of rules, each once"),
        (MixedRules(("match", "best"), CHOICE), "verify_chain: rule.rules must be one of 'ratio'"),
        (MixedRules(("match",), CHOICE.long()), "verify_chain: rule.choice must be int32, got int64"),
        (MixedRules(("match",), CHOICE[:2]), "verify_chain: rule.choice must be [6]"),
    ],
)
def test_wrong_mixtures_are_refused(rule: MixedRules, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        verify_chain(**{**chain(), "rule": rule})


def test_block_needs_its_step_in_a_mixture_too() -> None:
    given = chain()
    rng = given["rng"]._replace(step=None)
    with pytest.raises(ValueError, match=r"rng\.step must be given for rule 'block'"):
        verify_chain(**{**given, "rng": rng, "rule": MixedRules(("match", "block"), CHOICE)})


def test_each_rule_is_exact_in_a_mixture(fast_backend: str) -> None:
    """20,000 requests, every second under `match`, the others under `ratio`: both follow the target, not its twin."""
    n, p, q = 20000, torch.tensor([0.1, 0.3, 0.4, 0.2]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    device = "cuda" if fast_backend == "cuda" else "cpu"
    g = torch.Generator().manual_seed(5)
    drafts = torch.multinomial(q, n, replacement=True, generator=g)[:, None].to(device)

    def row(of: Tensor, rows: int) -> Tensor:
        return of.log().to(device).expand(n, rows, 4)

    seeds = torch.arange(n, device=device)
    result = verify_chain(
        drafts, row(p, 2), row(q, 1), sampling=Sampling(), draft_sampling=Sampling(),
        rng=RngKey(seeds, torch.full_like(seeds, 3)), rule=MixedRules(("match", "ratio"), (seeds % 2).int()),
    )  # fmt: skip
    for rule in (0, 1):
        first = result.token_ids[rule::2, 0].cpu()
        seen = torch.bincount(first, minlength=4) / len(first)
        error = (p * (1 - p) / len(first)).sqrt()
        assert bool(((seen - p).abs() < 5 * error).all())
        assert bool(((seen - q).abs() > 5 * error).any())


NUMBERS = ([0.0, 0.3, float("nan"), 0.05, -1.0, 1.0], [0.3, 1.0, 0.1, float("nan"), 0.2, 0.4])


@pytest.mark.parametrize(
    ("op", "rule", "names"),
    [
        (verify_chain, "ratio", ("over_acceptance",)),
        (verify_chain, "typical", ("typical_epsilon", "typical_delta")),
        (verify_tree, "typical", ("typical_epsilon", "typical_delta")),
    ],
)
def test_numbers_of_a_rule_are_those_of_each_request(
    backend: str, device: str, is_slow: bool, op: Any, rule: str, names: tuple[str, ...]
) -> None:
    """A bad number is a bad temperature."""
    given = moved({**(chain() if op is verify_chain else tree()), "rule": rule}, device)
    numbers = dict(zip(names, NUMBERS, strict=False))
    whole = op(**given, **{name: torch.tensor(values, device=device) for name, values in numbers.items()})
    for b in range(BATCH) if not is_slow else (1, 2):
        mine = {name: values[b] for name, values in numbers.items()}
        is_bad = not all(value >= 0 for value in mine.values())
        spoiled = given["sampling"]._replace(temperature=torch.full((BATCH,), float("nan"), device=device))
        alone = op(**given | {"sampling": spoiled}) if is_bad else op(**given, **mine)
        for field, ours, theirs in zip(whole._fields, whole, alone, strict=True):
            if theirs is not None:
                assert_same((ours[b : b + 1],), (theirs[b : b + 1],), (field,))
        assert bool(int(whole.status[b]) & Status.BAD_SAMPLING) == is_bad


def test_numbers_of_a_rule_are_read_by_it_alone(backend: str, device: str) -> None:
    given, bad = moved(chain(), device), torch.full((BATCH,), float("nan"), device=device)
    rules = MixedRules(("match", "typical"), (CHOICE % 2).to(device))
    whole = verify_chain(**{**given, "rule": rules}, typical_epsilon=bad)
    assert ((whole.status & Status.BAD_SAMPLING) != 0).int().tolist() == (CHOICE % 2).tolist()
