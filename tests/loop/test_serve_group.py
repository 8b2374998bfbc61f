"""One drafter for all requests of the server: each gets the drafts that it would get alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grammars import Letters
from head_models import DRAFTERS, draft_model, feature_head
from models import model
from test_serve_engine import alone, network, requests
from torch import Tensor

from specdec_kernels import Sampling
from specdec_loop import DraftModel, HeadChain, Lookahead, PromptLookup, SuffixDecoding, TreeCache
from specdec_loop.draft_length import FixedLength
from specdec_loop.drafters import Drafter
from specdec_loop.sequences import Sequences
from specdec_loop.serve.engine import Engine, Turn
from specdec_loop.serve.request import Request
from specdec_loop.stops import Stops

pytestmark = pytest.mark.usefixtures("one_thread")
small = functools.cache(draft_model)  # another one each time otherwise
MAKERS: dict[str, Callable[[], Drafter]] = {
    **DRAFTERS,
    "a draft model": lambda: DraftModel(small()),
    "... with windows": lambda: DraftModel(model("gemma3")),
    "... with states": lambda: DraftModel(model("qwen3_next")),
    "... with both in a layer": lambda: DraftModel(model("falcon_h1")),
    "... of states alone": lambda: DraftModel(model("mamba")),
    "prompt lookup": PromptLookup,
    "suffixes": lambda: SuffixDecoding(factor=2.0, memory=0),
    "lookahead": lambda: Lookahead(3, 4, 2, pool=32),
}
SHARED = ("MTP or suffix",)  # what its requests accept decides for all of them whether it copies


class Watched(Engine):
    """Notes the drafts of each request by the length of its text."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.drafts: dict[Request, dict[int, list[Any]]] = {}

    def _turns(self) -> list[Turn]:
        turns = super()._turns()
        for turn in turns:
            if not turn.reads:
                drafts = self.drafts.setdefault(turn.request, {})
                drafts[len(turn.request.tokens)] = turn.draft.token_ids.tolist()
        return turns


def asked() -> list[Request]:
    """Prompts of one token to many, greedy ones and sampled ones, of limits that end early and late."""
    rng = random.Random(4)
    sizes = [(1, 14, 0.0), (9, 30, 0.8), (40, 4, 0.8), (3, 22, 0.0), (17, 9, 1.0)]
    return [
        Request([rng.choice([rng.randrange(60), 7, 8]) for _ in range(n)], limit, temperature, top_p=0.95, seed=i)
        for i, (n, limit, temperature) in enumerate(sizes)
    ]


def engine(make: Callable[[], Drafter], slots: int = 3) -> Watched:
    return Watched(model(), make, draft_length=FixedLength(3), slots=slots, pages=60, page_size=8)


@pytest.mark.parametrize("drafter", MAKERS)
def test_a_request_gets_the_drafts_that_it_gets_alone(drafter: str) -> None:
    together, arriving = engine(MAKERS[drafter]), asked()
    leaves = Request([5, 6, 7], 30)
    for request in (arriving[0], leaves, *arriving[1:]):
        together.submit(request)
        for _ in range(2):
            together.step()
    together.cancel(leaves)
    together.run()
    for request in arriving:
        single = engine(MAKERS[drafter], slots=1)
        other = single.submit(
            Request(request.prompt, request.limit, request.temperature, top_p=0.95, seed=request.seed)
        )
        single.run()
        assert request.new == other.new and request.reason == "length"
        if drafter not in SHARED:
            assert together.drafts[request] == single.drafts[other]
            assert request.accepted == other.accepted


def test_the_drafter_runs_once_for_all_requests() -> None:
    """As many drafts as the longest text needs, not as many as all texts do."""
    calls = []

    class Counted(DraftModel):
        def draft(self, sequences: Sequences, length: int) -> Any:
            calls.append(sequences.batch)
            return super().draft(sequences, length)

    together = engine(lambda: Counted(small()))
    for seed in range(3):
        together.submit(Request([5, 6, 7], 12, 0.9, seed=seed))
    together.run()
    assert calls[0] == 3 and len(calls) <= 11


def test_a_text_that_is_skipped_keeps_its_features_while_others_come_and_go() -> None:
    """A copy was longer than the head's chain, for all requests: the head has not run when another one comes."""

    class Skipping(HeadChain):
        def draft(self, sequences: Sequences, length: int) -> Any:
            if len(sequences.rows[0]) % 3:
                self.skip(sequences)
                return PromptLookup.draft(copier(sequences), sequences, length)
            return super().draft(sequences, length)

    def copier(sequences: Sequences) -> PromptLookup:
        made = PromptLookup()
        made.begin(sequences, rule="match", sampling=Sampling(), longest=3)
        return made

    make = lambda: Skipping(feature_head("mtp", model()))  # noqa: E731
    first, second = Request([5, 6, 7] * 5, 30), Request([8, 9], 30)
    together = engine(make)
    together.submit(first)
    for _ in range(4):
        together.step()
    together.submit(second)
    together.run()
    single = engine(make, slots=1)
    other = single.submit(Request(first.prompt, 30))
    single.run()
    assert first.new == other.new and second.reason == "length"


def test_a_grammar_that_fails_while_drafts_are_made_ends_its_request_alone() -> None:
    class Broken(Letters):
        def matcher(self) -> Broken:
            return Broken()

        def fill(self, row: Tensor) -> None:
            if len(self.taken) == 2:
                row.zero_()
                raise RuntimeError("too complex")
            super().fill(row)

    together = Engine(network(), lambda: DraftModel(network(1)), slots=4, pages=90)
    fine, broken, other = requests(0.9)[0], requests(0.9)[3], requests(0.9)[4]
    broken.grammar, other.grammar = Broken(), Letters()
    for request in (fine, broken, other):
        together.submit(request)
    together.run()
    assert fine.new == alone(fine) and other.new == alone(other, grammar=Letters())
    assert (broken.reason, broken.error) == ("failed", "its grammar failed: too complex")


# --- what a batch is made of


def test_a_joined_batch_goes_on_with_the_texts_of_others() -> None:
    def text(*rows: list[int], limits: list[int], seed: int) -> Sequences:
        lengths = torch.tensor([len(row) for row in rows])
        padded = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in rows])
        stops = [Stops([9]) for _ in rows]
        seeds = torch.arange(seed, seed + len(rows))
        return Sequences(padded, lengths, seed=seeds, limits=limits, stops=stops, overhang=3)

    def grow(some: Sequences, rows: list[list[int]]) -> None:
        ids = torch.tensor(rows)
        followers = some.append(ids, (ids >= 0).sum(1).int() - 1)
        some.read(ids, torch.zeros(len(rows), dtype=torch.int32), followers)

    one, two = text([1, 2, 3], [4], limits=[2, 6], seed=5), text([7, 8], limits=[3], seed=9)
    grow(one, [[5, 6], [5, -1]])
    assert one.is_finished == [True, False]
    both = Sequences.joined([(one, 1), (two, 0)], 3)
    assert both.rows == [[4, 5], [7, 8]] and both.prompts == [1, 2] and both.ends == [2, 2]
    assert both.rng().seed.tolist() == [6, 9] and both.rng().position.tolist() == [2, 2]
    grow(both, [[1, 2, 3], [9, 1, 1]])
    assert both.rows == [[4, 5, 1, 2, 3], [7, 8, 9]] and both.is_finished == [False, True]
    grow(both, [[6, 7, 8], [1, 1, 1]])
    assert both.rows[0] == one.rows[1] == [4, 5, 1, 2, 3, 6, 7] and both.is_finished == [True, True]


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "falcon_h1"])
def test_a_cache_takes_requests_of_others(family: str) -> None:
    """Texts of several lengths go on as if they had been in one cache, behind tokens that were not committed."""
    network, device = model(family), torch.device("cpu")
    texts = [[5, 6, 7, 8, 9], [3, 4], [7, 7, 2]]

    def cache(batch: int, capacity: int) -> TreeCache:
        return TreeCache(network.config, batch=batch, capacity=capacity, dtype=network.dtype, device=device)

    def run(some: TreeCache, rows: list[list[int]]) -> Tensor:
        ids = torch.tensor(rows)
        with torch.no_grad():
            return network(ids, **some.chain_inputs(ids.shape[1])).logits

    def filled(rows: list[list[int]], capacity: int) -> TreeCache:
        made, longest = cache(len(rows), capacity), max(map(len, rows))
        run(made, [row + [1] * (longest - len(row)) for row in rows])
        made.commit(torch.tensor([len(row) - 1 for row in rows]).int())
        run(made, [[2, 2]] * len(rows))  # drafts, not committed
        return made

    pair, single, whole = filled(texts[:2], 30), filled(texts[2:], 12), filled([texts[1], texts[2]], 20)
    joined = cache(2, 10)
    joined.take([(pair, [1]), (single, [0])])
    whole.crop(-2)
    assert joined.lengths.tolist() == [2, 3]
    torch.testing.assert_close(run(joined, [[8, 9], [5, 6]]), run(whole, [[8, 9], [5, 6]]), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="take must be called on an empty cache of 1 requests, got 2 requests"):
        joined.take([(pair, [0])])
