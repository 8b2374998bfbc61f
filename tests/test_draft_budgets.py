"""Drafts that a budget cut: two requests keep their distributions, exactly, and two biased ways to cut are found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from cases import make_chain
from exact_chains import chain_distribution
from torch import Tensor

from specdec_kernels import (
    ChainRule,
    DraftAllocation,
    RngKey,
    Sampling,
    allocate_drafts,
    tree_from_marginals,
    tree_mask,
    verify_chain,
)
from specdec_kernels.ops.allocate_drafts import op  # noqa: F401 - the backends of this file's tests

VOCAB, DRAFT, REQUESTS = 3, 2, 2
Ids = tuple[int, ...]
Rows = dict[Ids, Tensor]
Allocate = Callable[[Tensor, Tensor], DraftAllocation]


def rows(seed: int) -> Rows:
    """A distribution behind each text of up to DRAFT tokens."""
    g = torch.Generator().manual_seed(seed)
    texts = [t for n in range(DRAFT + 1) for t in itertools.product(range(VOCAB), repeat=n)]
    return {t: torch.randn(VOCAB, generator=g).double().mul(1.5).softmax(0) for t in texts}


def expected(p: Rows) -> Tensor:
    """The first DRAFT + 1 tokens of the target."""
    texts = itertools.product(range(VOCAB), repeat=DRAFT + 1)
    shares = [math.prod(float(p[t[:i]][t[i]]) for i in range(DRAFT + 1)) for t in texts]
    return torch.tensor(shares, dtype=torch.float64)


def emitted(draft: Ids, p: Rows, q: Rows, rule: str) -> Tensor:
    """The same after verification of a draft; the target writes what is missing."""
    p_rows = torch.stack([p[draft[:i]] for i in range(len(draft) + 1)])
    q_rows = torch.stack([q[draft[:i]] for i in range(len(draft))]) if draft else torch.zeros(0, VOCAB)
    whole = torch.zeros(VOCAB ** (DRAFT + 1)).double()
    texts = list(itertools.product(range(VOCAB), repeat=DRAFT + 1))
    for tokens, share in chain_distribution(draft, p_rows, q_rows, rule).items():
        for place, text in enumerate(texts):
            if text[: len(tokens)] == tokens:
                whole[place] += share * math.prod(float(p[text[:i]][text[i]]) for i in range(len(tokens), DRAFT + 1))
    return whole


def joint_error(rule: str, confidence: Callable[[Rows, Ids, int], float], allocate: Allocate, seed: int) -> float:
    """Total variation of the texts of both requests from what two independent targets write, over all drafts."""
    p, q = ([rows(10 * seed + 2 * b + k) for b in range(REQUESTS)] for k in (0, 1))
    drafts = list(itertools.product(range(VOCAB), repeat=DRAFT))
    after = [{d[:n]: emitted(d[:n], p[b], q[b], rule) for d in drafts for n in range(DRAFT + 1)} for b in range(2)]
    whole = torch.zeros(VOCAB ** (DRAFT + 1), VOCAB ** (DRAFT + 1)).double()
    for pair in itertools.product(drafts, repeat=REQUESTS):
        weight = 1.0
        for b, draft in enumerate(pair):
            for i in range(DRAFT):
                weight *= float(q[b][draft[:i]][draft[i]])
        c = torch.tensor([[confidence(q[b], draft, i) for i in range(DRAFT)] for b, draft in enumerate(pair)])
        counts = allocate(torch.tensor(pair), c).num_draft.tolist()
        first, second = (after[b][pair[b][:n]] for b, n in enumerate(counts))
        whole += weight * torch.outer(first, second)
    return float((whole - torch.outer(*(expected(p[b]) for b in range(REQUESTS)))).abs().sum()) / 2


def largest(q: Rows, draft: Ids, i: int) -> float:
    """Confidence from the row that draft i was drawn from: known before it was drawn."""
    return float(q[draft[:i]].max())


def drawn(q: Rows, draft: Ids, i: int) -> float:
    """The probability of the id that was drawn: unlikely ids are cut, and the target draws in their place."""
    return float(q[draft[:i]][draft[i]])


CONVEX, STEP = torch.tensor([1.0, 1.2, 1.45, 1.75, 2.2]), torch.tensor([1.0, 1.3, 1.3, 1.75, 1.75])


def ways(**more: bool) -> Iterator[Allocate]:
    for budget in (1, 2, 3):
        yield lambda ids, c, n=budget: allocate_drafts(ids, c, budget=n)
    for cost in (CONVEX, STEP):
        yield lambda ids, c, table=cost: allocate_drafts(ids, c, budget=4, cost=table)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_cut_by_what_came_before_a_token_leaves_both_texts_alone(rule: str) -> None:
    """Exact up to float64 rounding, jointly: the cut of one request depends on the other's drafts."""
    for allocate, seed in itertools.product(ways(), (1, 2)):
        assert joint_error(rule, largest, allocate, seed) < 1e-12


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_twin_a_cut_by_the_probability_of_the_drawn_id_is_found(rule: str) -> None:
    for allocate in ways():
        assert joint_error(rule, drawn, allocate, 1) > 1e-3


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_twin_a_cut_by_confidences_behind_a_token_is_found(rule: str) -> None:
    """All drafts or none: whether draft 1 stays depends on the confidence behind it, and that on the id of draft 1."""

    def all_or_none(ids: Tensor, confidence: Tensor) -> DraftAllocation:
        cost = torch.tensor([1.0, 3.0, 3.0, 3.0, 2.3])
        return allocate_drafts(ids, confidence, budget=4, cost=cost, compare_all=True)

    assert joint_error(rule, largest, all_or_none, 1) > 1e-2
    assert joint_error(rule, lambda q, draft, i: 0.7 - 0.2 * i, all_or_none, 1) < 1e-12  # depends on no drawn token


def test_twin_a_cut_by_a_later_acceptance_is_found() -> None:
    """Dropping the drafts that would be rejected, after the coins are known, keeps the likely ids alone."""

    def until_rejected(p: Rows, q: Rows, draft: Ids) -> Tensor:
        whole, alive = torch.zeros(VOCAB ** (DRAFT + 1)).double(), 1.0
        for i, x in enumerate(draft):
            accept = min(1.0, float(p[draft[:i]][x]) / float(q[draft[:i]][x]))
            whole += alive * (1 - accept) * emitted(draft[:i], p, p, "ratio")
            alive *= accept
        return whole + alive * emitted(draft, p, p, "ratio")

    p, q = rows(1), rows(2)
    weights = {d: drawn(q, d, 0) * drawn(q, d, 1) for d in itertools.product(range(VOCAB), repeat=DRAFT)}
    error = sum((w * until_rejected(p, q, d) for d, w in weights.items()), -expected(p)).abs().sum() / 2
    assert float(error) > 1e-2


@pytest.mark.parametrize("budget", [5, 8])  # cuts; leaves room
@pytest.mark.parametrize("rule", ["ratio", "greedy"])
def test_the_flat_layout_decides_as_calls_of_each_request(
    backend: str, device: str, rule: ChainRule, budget: int
) -> None:
    batch, draft, vocab = 3, 3, 7
    case = make_chain(batch, draft, vocab, seed=4)
    ids, target, given = (x.to(device) for x in (case.draft_ids, case.target_logits, case.draft_logits))
    ids[0, 1:] = -1
    confidence = torch.rand(batch, draft, generator=torch.Generator().manual_seed(1)).to(device)
    kept = allocate_drafts(ids, confidence, budget=budget)
    counts = kept.num_draft.tolist()
    assert sum(counts) == min(budget, 7)
    place = kept.source.long().clamp(min=0)
    rows = [target[b, : n + 1] for b, n in enumerate(counts)]
    target_rows = torch.cat([*rows, target.new_zeros(budget - sum(counts), vocab)])  # what pads is never read
    greedy = rule == "greedy"
    sampling = Sampling.full(batch, temperature=0.8, device=device)

    def verify(ids: Tensor, target: Tensor, given: Tensor, chosen: slice, **flat: object) -> list[Sequence[int]]:
        part = Sampling(*(None if x is None else x[chosen] for x in sampling))
        numbers = RngKey(*(torch.arange(batch, device=device)[chosen] * k for k in (1, 7, 3)))
        named = {} if greedy else {"draft_logits": given, "draft_sampling": part}
        return verify_chain(ids, target, sampling=part, rng=numbers, rule=rule, **named, **flat).token_ids.tolist()  # type: ignore[arg-type]

    together = verify(
        kept.draft_ids, target_rows, given.flatten(0, 1)[place], slice(None), cu_draft=kept.cu_draft, max_draft=draft
    )  # fmt: skip
    for b, n in enumerate(counts):
        one = slice(b, b + 1)
        alone = verify(ids[one, :n].contiguous(), target[one, : n + 1], given[one, :n], one)
        assert together[b] == alone[0] + [-1] * (draft - n)


@pytest.mark.parametrize("budget", [0, 1, 7, 20, 100])
def test_trees_share_a_budget_by_their_best_nodes(backend: str, device: str, budget: int) -> None:
    """The docs' recipe against all prefixes of all requests."""
    batch, depth, width, g = 3, 3, 3, torch.Generator().manual_seed(budget)
    logprobs = (2 * torch.randn(batch, depth, width, generator=g)).log_softmax(2)
    ids = torch.randint(1, 50, (batch, depth, 1), generator=g) + 50 * torch.arange(width)
    on = lambda part: part.contiguous().to(device)  # noqa: E731
    whole = tree_from_marginals(on(ids), on(logprobs), num_nodes=25)
    source = whole.source.long()
    own = torch.where(source >= 0, on(logprobs).flatten(1).gather(1, source.clamp(min=0)), 0.0)
    score = (tree_mask(whole.parents).mask[:, 0] * own[:, None]).sum(2)
    confidence = score.diff(dim=1).exp().clamp(max=1.0)
    kept = allocate_drafts(whole.token_ids[:, 1:].contiguous(), confidence, budget=budget)
    tree = tree_from_marginals(on(ids), on(logprobs), num_nodes=25, max_nodes=kept.num_draft + 1)
    paths = []
    for b in range(batch):
        prefixes = (p for n in range(1, depth + 1) for p in itertools.product(range(width), repeat=n))
        paths += [(sum(float(logprobs[b, d, x]) for d, x in enumerate(p)), b, p) for p in prefixes]
    best = sorted(paths, reverse=True)
    allowed = [path for path in best if path in [q for q in best if q[1] == path[1]][:24]][:budget]
    found = set()
    for b, (tokens, parents) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        for node in range(1, 25):
            path: tuple[int, ...] = ()
            while node > 0 and tokens[node] >= 0:
                path, node = ((tokens[node] - 1) // 50, *path), parents[node]
            found |= {(b, path)} if path else set()
    assert found == {(b, path) for _, b, path in allowed}
