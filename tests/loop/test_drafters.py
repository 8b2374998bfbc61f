"""Each drafter: what it proposes, and that sampled drafts leave the target's distribution alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from exact_texts import REQUESTS, distribution, many, surprise, tiny
from head_models import feature_head, medusa, watch
from models import model
from texts import prompts, text_of
from torch import Tensor

from specdec_kernels import SampleResult, Sampling, verify_tree
from specdec_loop import Datastore, DraftModel, IndependentDrafts, Lookahead, PromptLookup, Retrieval, generate
from specdec_loop.drafters import (
    Draft,
    Drafter,
    EagleDynamicTree,
    HeadChain,
    Medusa,
    Outcome,
    SuffixDecoding,
    SuffixOr,
)
from specdec_loop.drafters.base import Confidence
from specdec_loop.sequences import Sequences

FALSE_ALARM = 1e-6  # of each distribution test below; seeds are fixed, so an alarm would stay

# --- what is proposed


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["plain", "chain", "eagle2", "medusa"])
def test_the_default_dtype_changes_no_text(kind: str, default_dtype: torch.dtype) -> None:
    target = model()
    drafters: dict[str, Callable[[], Drafter | None]] = {
        "plain": lambda: None,
        "chain": lambda: HeadChain(feature_head("mtp", target)),
        "eagle2": lambda: EagleDynamicTree(feature_head("eagle", target), width=2, total=4),
        "medusa": lambda: Medusa(medusa(), [(0,), (1,), (0, 0)]),
    }
    drafter = drafters[kind]()
    options: dict[str, Any] = {"sampling": Sampling(torch.tensor([0.0, 0.9])), "max_new_tokens": 8, "seed": 3}
    want = generate(target, drafter, prompts(2), **options).tokens
    torch.set_default_dtype(default_dtype)
    assert generate(target, drafter, prompts(2), **options).tokens == want


def proposed(drafter: Drafter, sequences: Sequences, length: int, rule: str = "match") -> list[list[int]]:
    drafter.begin(sequences, rule=rule, sampling=Sampling.full(sequences.batch), longest=length)
    ids = drafter.draft(sequences, length).token_ids
    assert ids.shape[1] == 0 or bool((ids[:, -1] >= 0).any())  # no wider than the longest
    return [[i for i in row if i >= 0] for row in ids.tolist()]


def test_prompt_lookup_copies_what_followed_the_longest_match() -> None:
    sequences = text_of(
        [1, 2, 3, 9, 4, 2, 3, 5, 1, 2, 3],  # 1, 2, 3 stood at the front: what followed 2, 3 later does not count
        [2, 3, 5, 4, 2, 3, 6, 4, 2, 3],  # 4, 2, 3 once; of two equally long matches the latest
        [7, 8, 7, 8, 7],  # a period goes on
        [1, 2, 3, 4, 5],  # nothing comes back
        [4],
    )
    want = [[9, 4, 2, 3, 5], [6, 4, 2, 3, 6], [8, 7, 8, 7, 8], [], []]
    assert proposed(PromptLookup(4), sequences, 5) == want
    assert proposed(PromptLookup(4, shortest=4), sequences, 5)[:2] == [[], []]
    assert proposed(PromptLookup(4, factor=1), sequences, 5) == [[9, 4, 2], [6, 4, 2], [8, 7, 8], [], []]
    assert proposed(PromptLookup(1, factor=2.5), sequences, 5)[0] == [5, 1]
    assert proposed(PromptLookup(4, factor=float("inf")), sequences, 5) == proposed(PromptLookup(4), sequences, 5)


def test_prompt_lookup_agrees_with_a_search_in_plain_python() -> None:
    rng = random.Random(3)
    rows = [[rng.randrange(3) for _ in range(rng.randint(1, 30))] for _ in range(60)]

    def search(row: list[int]) -> list[int]:
        for n in (3, 2):
            ends = [i for i in range(n, len(row)) if row[i - n : i] == row[-n:]]
            if ends:
                copy = row[ends[-1] :]
                return (copy * 4)[:4]
        return []

    assert proposed(PromptLookup(3, shortest=2), text_of(*rows), 4) == [search(row) for row in rows]


def test_suffix_decoding_follows_the_most_frequent_continuation() -> None:
    sequences = text_of([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2], [5, 6, 5], [9])
    # 1, 2 was followed by 3 twice and by 4 once: 3 with 2 / 3; then 1 and 2, always.
    assert proposed(SuffixDecoding(factor=2), sequences, 4) == [[3, 1, 2, 3], [6, 5], []]
    assert proposed(SuffixDecoding(factor=2, least=0.7), sequences, 4)[0] == []
    assert proposed(SuffixDecoding(factor=1), sequences, 4)[1] == [6]  # a match of one token: one draft


def test_suffix_decoding_remembers_other_texts() -> None:
    drafter, first = SuffixDecoding(), text_of([8])
    proposed(drafter, first, 3)
    first.rows[0] += [1, 2, 3, 4, 5]
    drafter.end(first, [0])
    assert proposed(drafter, text_of([7, 1, 2, 3], [7, 8]), 3) == [[4, 5], []]


def test_lookahead_learns_a_cycle() -> None:
    """Once the window was filled, every guess of what a model that counts modulo 5 will say is right."""

    class Counting(torch.nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.nn.functional.one_hot((ids + 1) % 5, 5).float() * 9

    drafter, text, accepted = Lookahead(4, 6, 3), text_of([0, 1, 2, 3, 4, 0], [3, 1, 0, 2, 4]), []
    sampling = Sampling.full(2, temperature=0.0)
    drafter.begin(text, rule="greedy", sampling=sampling, longest=3)
    for _ in range(6):
        draft = drafter.draft(text, 3)
        assert draft.parents is not None and draft.candidates is not None
        ids = torch.cat([text.last(1), draft.token_ids[:, 1:]], 1)
        logits = Counting()(ids.clamp(min=0))
        some = slice(0, draft.candidates)
        verdict = verify_tree(
            ids[:, some].contiguous(),
            draft.parents[:, some].contiguous(),
            logits[:, some],
            max_depth=draft.max_depth,
            sampling=sampling,
            rng=text.rng(),
            rule="greedy",
        )
        followers = text.append(verdict.token_ids, verdict.num_accepted)
        drafter.commit(text, Outcome(logits, followers, verdict.path))
        text.read(verdict.token_ids, verdict.status, followers)
        accepted.append(verdict.num_accepted.tolist())
    assert accepted[-3:] == [[3, 3]] * 3
    assert all((row[i] + 1) % 5 == row[i + 1] for row in text.rows for i in range(6, len(row) - 1))


@pytest.mark.parametrize("level", [2, 3, 4])
def test_every_column_of_the_window_becomes_an_n_gram(level: int) -> None:
    """The first column begins with the last token of the text, and its n-gram is the newest."""
    window, vocab = 3, 50
    drafter, text = Lookahead(level, window, 2), text_of([1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14])
    drafter.begin(text, rule="greedy", sampling=Sampling.full(2, temperature=0.0), longest=level - 1)
    draft = drafter.draft(text, level - 1)
    nodes = draft.token_ids.shape[1]
    rows = torch.cat([text.last(1), draft.token_ids[:, nodes - (level - 1) * window + 1 :]], 1)
    rows = rows.view(2, level - 1, window)
    answers = torch.arange(nodes) + 20 + torch.tensor([[0], [1]])  # what the target says after each node
    path = torch.full((2, level), -1, dtype=torch.int32)  # nothing was accepted
    drafter.commit(text, Outcome(torch.nn.functional.one_hot(answers, vocab).float(), torch.zeros(2).int(), path))
    said = answers[:, -window:].clone()
    if level == 2:
        said[:, 0] = answers[:, 0]  # the first column is the root itself
    want = [[[*rows[b, :, c].tolist(), int(said[b, c])] for c in range(window)] for b in range(2)]
    assert drafter._pool[:, :window].tolist() == want
    assert [grams[0][0] for grams in want] == [7, 14]


def test_lookahead_runs_the_tokens_of_the_paper() -> None:
    for level, window, guesses in ((2, 1, 1), (3, 5, 2), (5, 7, 4)):
        drafter = Lookahead(level, window, guesses)
        drafter.begin(text_of([1, 2]), rule="greedy", sampling=Sampling(), longest=level - 1)
        draft = drafter.draft(text_of([1, 2]), level - 1)
        assert draft.token_ids.shape[1] <= drafter.nodes(level - 1) == (level - 1) * (window + guesses)
        assert draft.parents is not None and draft.candidates is not None
        first = draft.candidates  # of the window, which hangs on the root and on itself
        for node, parent in enumerate(draft.parents[0, first:].tolist(), first):
            assert parent == 0 or first <= parent < node


def test_a_draft_model_may_have_another_vocabulary() -> None:
    token_map = torch.tensor([40, 2, 17, 33, 5, 1]).int()
    drafter = DraftModel(tiny(0, vocab=6), token_map=token_map)
    ids = proposed(drafter, text_of([40, 2, 17], [33, 60, 2, 2]), 3, rule="greedy")
    model_ids = torch.tensor([[0, 1, 2], [3, 0, 1]])  # 60 is shown as id 0; the last token follows
    first = tiny(0, vocab=6)(torch.tensor([[3, 0, 1, 1]])).logits[0, -1].argmax()
    assert ids[1][0] == int(token_map[first])
    first = tiny(0, vocab=6)(model_ids[:1]).logits[0, -1].argmax()
    assert ids[0][0] == int(token_map[first])
    assert {x for row in ids for x in row} <= set(token_map.tolist())


def test_a_draft_model_of_fewer_ids_needs_a_map() -> None:
    target, drafter = tiny(1), DraftModel(tiny(0, vocab=3))
    for given, got in (([0, 1, 2], "list"), (torch.arange(3), "torch.int64")):
        with pytest.raises(ValueError, match=rf"token_map must be a tensor of int32 \[draft_vocab\], got {got}"):
            DraftModel(tiny(0, vocab=3), token_map=given)  # type: ignore[arg-type]
    refusal = r"drafter must be of the target's \d+ ids, or with a token_map, got 3 ids"
    for of_fewer in (drafter, SuffixOr(drafter)):
        with pytest.raises(ValueError, match=refusal):
            generate(target, of_fewer, [[1, 2]], rule="match", sampling=Sampling(), max_new_tokens=2)
    mapped = DraftModel(tiny(0, vocab=3), token_map=torch.arange(3, dtype=torch.int32))
    assert generate(target, mapped, [[3, 2]], rule="match", sampling=Sampling(), max_new_tokens=2).tokens[0]


def test_a_draft_model_of_more_ids_is_refused() -> None:
    target, drafter = tiny(1), DraftModel(tiny(0, vocab=99))
    refusal = r"drafter must be of the target's \d+ ids, or with a token_map, got 99 ids"
    with pytest.raises(ValueError, match=refusal):
        generate(target, drafter, [[1, 2]], rule="match", sampling=Sampling(), max_new_tokens=2)


def test_retrieval_drafts_the_most_frequent_beginnings() -> None:
    store = Datastore.build([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5, 6], [8, 2, 9], [1, 2, 7]])
    drafter = Retrieval(store, candidates=4)
    sequences = text_of([4, 1, 2], [1, 9], [3, 8, 2])
    draft = drafter.draft(sequences, 3)
    # 3 follows 1, 2 three times, then twice 5; then 7 and 3, 4 came once, the shorter one first.
    assert draft.token_ids.tolist() == [[-1, 3, 5, 7, 4], [-1] * 5, [-1, 9, -1, -1, -1]]
    assert draft.parents is not None
    assert draft.parents.tolist() == [[-1, 0, 1, 0, 1], [-1] * 5, [-1, 0, -1, -1, -1]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PromptLookup(2, shortest=3),
        lambda: PromptLookup(factor=0.5),
        lambda: PromptLookup(factor=float("nan")),
        lambda: SuffixDecoding(depth=1),
        lambda: Lookahead(level=1),
        lambda: Lookahead(window=0),
        lambda: Lookahead(pool=1),
        lambda: DraftModel(None, confidence=1.0),
        lambda: IndependentDrafts(None, chains=0),
        lambda: SuffixOr(IndependentDrafts(None)),
        lambda: Retrieval(Datastore.build([[1]]), candidates=0),
        lambda: Retrieval(Datastore.build([[1]]), candidates=1024),
        lambda: EagleDynamicTree(feature_head("eagle", model()), width=0),
        lambda: EagleDynamicTree(feature_head("eagle", model()), total=1024),
    ],
)
def test_sizes_out_of_range_are_refused(make: Callable[[], Drafter]) -> None:
    with pytest.raises(ValueError, match=r"must|expected"):
        make()


@pytest.mark.parametrize(
    ("make", "nodes"), [(lambda: IndependentDrafts(tiny(1), 256), 1025), (lambda: Lookahead(4, 341, pool=400), 1035)]
)
def test_a_tree_too_large_to_verify_names_its_drafter(make: Callable[[], Drafter], nodes: int) -> None:
    drafter = make()
    with pytest.raises(ValueError, match=f"{type(drafter).__name__}: trees must have at most 1024 nodes, got {nodes}"):
        generate(tiny(0), drafter, rule="recursive", draft_length=4, **many(requests=2))


@pytest.mark.parametrize(("width", "depth"), [(16, 4), (40, 1)])
def test_a_dynamic_tree_grows_as_deep_as_its_candidates_may_be(width: int, depth: int) -> None:
    drafter = EagleDynamicTree(feature_head("eagle", model()), width=width, total=1023)
    sampling = Sampling.full(1, temperature=0.0)
    result = generate(model(), drafter, prompts(1), sampling=sampling, draft_length=6, max_new_tokens=4)
    assert result.tokens == generate(model(), None, prompts(1), sampling=sampling, max_new_tokens=4).tokens
    assert result.statistics[0].drafted[0] == depth


# --- the cache of a draft model


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["chain", "two chains", "copies too"])
def test_the_cache_of_a_draft_model_holds_what_the_whole_text_says(kind: str, family: str) -> None:
    known, target = model(family, seed=1), model(family)
    inner: DraftModel = IndependentDrafts(known, 2) if kind == "two chains" else DraftModel(known)
    compared = watch(inner, lambda row: known(row).logits[0, -1])
    drafter = SuffixOr(inner) if kind == "copies too" else inner
    arguments = {"sampling": Sampling.full(7, temperature=0.4), "max_new_tokens": 40, "draft_length": 3, "seed": 4}
    steps: list[int] = []
    inner.skip = lambda text: steps.append(1) or DraftModel.skip(inner, text)  # type: ignore[method-assign,func-returns-value]
    if kind == "two chains":
        generate(target, drafter, prompts(7), rule="recursive", **arguments)
    else:
        starts = [[5, 6, 7, 8] * 6] * 7 if kind == "copies too" else prompts(7)
        got, want = (generate(target, d, starts, **arguments).tokens for d in (drafter, None))
        assert got == want
    assert bool(steps) == (kind == "copies too")
    assert len(compared) > 30 and len(set(compared)) > 20


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_independent_chains_do_not_see_each_other(family: str) -> None:
    known, warm = model(family, seed=1), Sampling.full(2, temperature=1.0)
    drafter, text = IndependentDrafts(known, 3), text_of([*range(1, 12)], [3, 4, 5])
    drafter.begin(text, rule="recursive", sampling=warm, longest=3)
    draft = drafter.draft(text, 3)
    assert draft.parents is not None and draft.logits is not None
    for b, row in enumerate(text.rows):
        parents, ids = draft.parents[b].tolist(), draft.token_ids[b].tolist()
        for node in range(1 + 3 * 2):  # the leaves were not run
            branch, above = [], node
            while above > 0:
                branch, above = [ids[above], *branch], parents[above]
            want = known(torch.tensor([row + branch])).logits[0, -1]
            assert torch.allclose(draft.logits[b, node], want, atol=1e-4), f"request {b}, node {node}"


def test_a_draft_model_catches_up_after_copies() -> None:
    """Also beside a finished text that fills its place, behind which the cache has little room."""
    known, cold = model(seed=1), Sampling.full(2, temperature=0.0)
    inner = DraftModel(known)
    compared = watch(inner, lambda row: known(row).logits[0, -1])
    inner.begin(text := text_of([5, 6], [*range(1, 40)], limit=60), rule="match", sampling=cold, longest=3)

    def copied(*rows: list[int]) -> None:
        inner.skip(text)
        ids = torch.tensor(rows)
        text.read(ids, torch.zeros(2).int(), text.append(ids, (ids > -1).sum(1).int() - 1))

    for _ in range(15):
        copied([9, -1, -1, -1], [9, 10, 11, 12])
    assert text.is_finished == [False, True] and text.ends == [17, 99]
    inner.draft(text, 3)
    del compared[:]
    for _ in range(40):
        copied([7, -1, -1, -1], [-1] * 4)
    ids = inner.draft(text, 3).token_ids
    assert compared[-1] == 57 and len(compared) < 12  # several copies at once
    assert ids[1].tolist() == [-1] * 3
    row = text.tokens[:1, :57]
    for _ in range(3):
        row = torch.cat([row, known(row).logits[:, -1:].argmax(-1)], 1)
    assert ids[0].tolist() == row[0, 57:].tolist()


# --- the distribution of three tokens in a row


@pytest.mark.parametrize(
    ("rule", "length", "temperature"), [("ratio", 1, 0.7), ("ratio", 3, 1.0), ("block", 3, 1.0), ("match", 3, 0.7)]
)
def test_chains_leave_the_distribution_alone(rule: str, length: int, temperature: float) -> None:
    result = generate(tiny(0), DraftModel(tiny(1)), rule=rule, draft_length=length, **many(temperature))
    assert surprise(result.tokens, distribution(tiny(0), temperature)) > FALSE_ALARM
    # Drafts are neither all right nor all wrong, or nothing would have been tested.
    assert 0.2 < sum(r.accepted[0] > 0 for r in result.statistics) / len(result.tokens) < 0.95


def test_drafts_may_have_a_temperature_of_their_own() -> None:
    drafter = DraftModel(tiny(1), sampling=Sampling.full(REQUESTS, temperature=1.7))
    result = generate(tiny(0), drafter, rule="ratio", **many())
    assert surprise(result.tokens, distribution(tiny(0), 1.0)) > FALSE_ALARM


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_smaller_vocabulary_leaves_the_distribution_alone(rule: str) -> None:
    drafter = DraftModel(tiny(2, vocab=3), token_map=torch.tensor([3, 0, 2]).int())
    result = generate(tiny(0), drafter, rule=rule, **many())
    assert surprise(result.tokens, distribution(tiny(0), 1.0)) > FALSE_ALARM


def small_calls(drafter: DraftModel, rule: str) -> tuple[list[list[int]], set[int]]:
    """Texts of many calls of one request, whose drafts end by themselves, and their lengths."""
    texts, lengths = [], set()
    for call in range(2400):
        arguments = many(requests=1)
        arguments["seed"] += call * 100_003
        result = generate(tiny(0), drafter, rule=rule, draft_length=3, **arguments)
        texts += result.tokens
        lengths |= {result.statistics[0].drafted[0]}
    return texts, lengths


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_chains_that_end_where_they_are_unsure_leave_the_distribution_alone(rule: str) -> None:
    texts, lengths = small_calls(DraftModel(tiny(1), confidence=0.2), rule)
    assert lengths == {2, 3} and surprise(texts, distribution(tiny(0), 1.0)) > FALSE_ALARM


class Peeping(Confidence):
    """Looks at the tokens that were drawn, and takes back the last one where it is unlikely."""

    def is_lost(self, logits: torch.Tensor, drawn: SampleResult) -> bool:
        return bool(drawn.logprobs[0, 0] < -1.3)


class Shortened(DraftModel):
    """Drops the token at which its chain ended."""

    def draft(self, sequences: Sequences, length: int) -> Draft:
        self._confidence.__class__ = Peeping
        draft = super().draft(sequences, length)
        width = draft.token_ids.shape[1]
        if width == length:
            return draft
        assert draft.logits is not None
        return draft._replace(token_ids=draft.token_ids[:, :-1], logits=draft.logits[:, :-1], stats=None)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_chains_that_end_by_what_was_drawn_are_seen(rule: str) -> None:
    texts, lengths = small_calls(Shortened(tiny(1), confidence=0.2), rule)
    assert len(lengths) > 1 and surprise(texts, distribution(tiny(0), 1.0)) < FALSE_ALARM


def test_a_text_that_repeats_itself_is_copied_and_another_is_left_to_the_head() -> None:
    head, cold = feature_head("mtp", model()), Sampling.full(2, temperature=0.0)
    sequences = text_of([5, 6, 7, 8] * 6, list(range(1, 25)))
    hidden, drafts = torch.randn(2, 23, 32), []
    for drafter in (SuffixOr(HeadChain(head)), HeadChain(head)):
        drafter.begin(sequences, rule="match", sampling=cold, longest=6)
        drafter.prefill(sequences, hidden)
        drafts.append(drafter.draft(sequences, 6).token_ids.tolist())
    assert drafts[0] == [[5, 6, 7, 8, 5, 6], drafts[1][1]] and min(drafts[1][1]) >= 0


def test_drafts_of_the_other_are_as_long_as_it_says() -> None:
    sequences = text_of([5, 6, 7, 8] * 6, [1, 2, 3, 1], [*range(1, 25)])
    (drafter := SuffixOr(PromptLookup())).begin(sequences, rule="match", sampling=Sampling(), longest=6)
    draft = drafter.draft(sequences, 6)
    assert draft.lengths == [6, 3, 0] == (draft.token_ids >= 0).sum(1).tolist()


def test_one_made_of_another_follows_and_ends_with_it() -> None:
    """Two of them, one inside the other: the head sees every step, copied or not; and both learn the texts."""
    inner = SuffixOr(HeadChain(feature_head("mtp", model())))
    arguments = {"sampling": Sampling.full(2, temperature=0.3), "max_new_tokens": 40, "stop": ()}
    starts = [[5, 6, 7, 8] * 6, [7, 8] * 9]
    got = generate(model(), SuffixOr(inner), starts, draft_length=4, **arguments)
    assert got.tokens == generate(model(), None, starts, **arguments).tokens
    assert inner.suffixes._past is not None and len(inner.suffixes._past) > 40  # continuations of these texts


def test_a_drafter_of_trees_is_refused_when_it_drafts() -> None:
    class Tree(Drafter):
        def draft(self, sequences: Sequences, length: int) -> Draft:
            return Draft(sequences.last(1), parents=torch.full((sequences.batch, 1), -1))

    sequences = text_of([1, 2, 3])
    (drafter := SuffixOr(Tree())).begin(sequences, rule="match", sampling=Sampling(), longest=3)
    with pytest.raises(ValueError, match="drafter must draft chains, but Tree drafts trees"):
        drafter.draft(sequences, 3)


def test_copies_are_trusted_as_far_as_they_were_right() -> None:
    drafter, text = SuffixOr(HeadChain(feature_head("mtp", model()))), text_of([5, 6, 7, 8] * 6)
    drafter.begin(text, rule="match", sampling=Sampling.full(1, temperature=0.0), longest=6)
    drafter.prefill(text, torch.randn(1, 23, 32))

    def copies(accepted: int) -> bool:
        """Whether it copies again when so many tokens of its last copies were accepted."""
        for _ in range(12):
            drafter._asked = [(6.0, len(text.rows[0]) - 1 - accepted)]
            drafter._learn(text)
        return drafter.draft(text, 6).token_ids[0].tolist() == [5, 6, 7, 8, 5, 6]

    assert copies(6) and not copies(0) and copies(6)


@pytest.mark.parametrize("seed", range(3))
def test_copies_of_some_of_a_batch_leave_seeded_texts_alone(seed: int) -> None:
    drafter = SuffixOr(HeadChain(feature_head("mtp", model()), confidence=0.1))
    starts = [[5, 6, 7, 8] * 6, [*range(1, 25)]]
    seen = []
    propose = drafter.suffixes.propose
    drafter.suffixes.propose = lambda text, length: seen.append(drafter._asked) or propose(text, length)  # type: ignore[method-assign,func-returns-value]
    starts.append([9, 10] * 5)
    arguments = {"sampling": Sampling(temperature=torch.tensor([0.0, 0.3, 0.0])), "seed": seed, "max_new_tokens": 60}
    got = generate(model(), drafter, starts, draft_length=5, **arguments)
    assert got.tokens == generate(model(), None, starts, **arguments).tokens
    kinds = {sum(promise > 0 for promise, _ in asked) for asked in seen if asked}
    assert {0} < kinds, "copies in some steps and none in others"


@pytest.mark.parametrize("length", [1, 3])
def test_independent_drafts_leave_the_distribution_alone(length: int) -> None:
    drafter, arguments = IndependentDrafts(tiny(1), 2), many()
    result = generate(tiny(0), drafter, rule="recursive", draft_length=length, **arguments)
    assert surprise(result.tokens, distribution(tiny(0), 1.0)) > FALSE_ALARM
    alone = generate(tiny(0), DraftModel(tiny(1)), rule="ratio", draft_length=length, **arguments)
    first, first_alone = (sum(r.accepted[0] > 0 for r in g.statistics) / REQUESTS for g in (result, alone))
    assert first > first_alone + 0.02  # two first tokens are tried


class Liar(DraftModel):
    """Says that its drafts were drawn at another temperature than they were."""

    def draft(self, sequences: Sequences, length: int) -> Draft:
        return (
            super()
            .draft(sequences, length)
            ._replace(stats=None, sampling=Sampling.full(sequences.batch, temperature=2.0))
        )


class Picky(DraftModel):
    """Looks at a token that it drew before it decides whether to draft it."""

    def draft(self, sequences: Sequences, length: int) -> Draft:
        draft = super().draft(sequences, length)
        return draft._replace(token_ids=draft.token_ids.masked_fill((draft.token_ids == 1).cumsum(1) > 0, -1))


@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("wrong", [Liar, Picky])
def test_a_small_bias_is_seen(wrong: type[DraftModel], rule: str) -> None:
    result = generate(tiny(0), wrong(tiny(1)), rule=rule, draft_length=3, **many())
    assert surprise(result.tokens, distribution(tiny(0), 1.0)) < FALSE_ALARM
