"""The server's engine: requests come and go, and none of them can tell from its text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_texts import tiny
from grammars import Letters
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_kernels import Edits, Sampling
from specdec_loop import (
    Datastore,
    DraftModel,
    IndependentDrafts,
    Lookahead,
    PromptLookup,
    Retrieval,
    StepTimes,
    SuffixDecoding,
    generate,
)
from specdec_loop.draft_length import AdaptiveLength, FixedLength
from specdec_loop.drafters import Drafter
from specdec_loop.serve.engine import PIECE, Engine, Progress
from specdec_loop.serve.group import MOST_FAULTS, REST
from specdec_loop.serve.request import Request, acceptances

VOCAB = 23

pytestmark = pytest.mark.usefixtures("one_thread")


def network(layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.15, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def requests(temperature: float, count: int = 7) -> list[Request]:
    """Prompts of one token to several pieces of the engine's; limits that end early and late."""
    rng = random.Random(1)
    lengths, limits = [1, 5, PIECE + 90, 2, 70, 9, 3], [20, 1, 12, 24, 15, 18, 2]
    prompts = [[rng.choice([rng.randrange(VOCAB), 7, 8]) for _ in range(n)] for n in lengths]
    return [Request(prompts[i], limits[i], temperature, top_k=9, top_p=0.95, seed=5 + i) for i in range(count)]


def alone(request: Request, **more: Any) -> list[int]:
    """Text of the decoding loop."""
    sampling = Sampling.full(1, temperature=request.temperature, top_k=request.top_k or None, top_p=request.top_p)
    how = {"sampling": sampling, "seed": request.seed, "max_new_tokens": request.limit, "stop": ()}
    return generate(network(), None, [request.prompt], **how, **more).tokens[0]


def texts(engine: Engine, some: list[Request]) -> dict[Request, list[int]]:
    """Tokens as the steps tell them."""
    told: dict[Request, list[int]] = {request: [] for request in some}
    while engine.waiting or engine.running:
        for progress in engine.step():
            told[progress.request] += progress.tokens
    return told


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "plain": lambda: None,
    "copies": PromptLookup,
    "suffixes": lambda: SuffixDecoding(factor=2.0),
    "a model's chains": lambda: DraftModel(network(1)),
    "trees": lambda: Lookahead(3, 4, 2, pool=32),
}


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_text_does_not_depend_on_companions_that_come_and_go(temperature: float, drafter: str) -> None:
    engine = Engine(network(), DRAFTERS[drafter], draft_length=FixedLength(3), slots=3, pages=90, page_size=8)
    arriving = requests(temperature)
    for request in arriving[:2]:
        engine.submit(request)
    finished: list[Progress] = []
    for late in arriving[2:]:
        finished += engine.step() + engine.step()
        assert len(engine.running) <= 3
        engine.submit(late)
    while engine.waiting or engine.running:
        finished += engine.step()
    assert [p.request for p in finished if p.reason] != [] and all(r.reason == "length" for r in arriving)
    for request in arriving:
        assert request.new == alone(request)
        assert request.new == [token for p in finished if p.request is request for token in p.tokens]
    kept = [sum(request.accepted) for request in arriving]
    assert (sum(kept) > 0) == (drafter != "plain")
    assert engine.pages.used == 0


def test_drafts_outside_the_vocabulary_change_no_text() -> None:
    store = Datastore.build([[token, VOCAB] for token in range(VOCAB)])
    engine, some = Engine(network(), lambda: Retrieval(store, shortest=1)), requests(0.9, 3)
    for request in some:
        engine.submit(request)
    assert texts(engine, some) == {request: alone(request) for request in some}


def test_each_drafter_of_the_repository_is_served_or_refused_with_its_rule() -> None:
    with pytest.raises(ValueError, match="IndependentDrafts cannot be served: its drafts are verified under recursive"):
        Engine(network(), lambda: IndependentDrafts(network(1), 2))
    with pytest.raises(ValueError, match="Lookahead cannot be served under a budget of drafts: it needs the whole"):
        Engine(network(), lambda: Lookahead(3, 4, 2, pool=32), budget=3)
    for vocab in (6, 99):
        refusal = rf"DraftModel drafts {vocab} ids, and the target has \d+: give it a token_map"
        with pytest.raises(ValueError, match=refusal):
            Engine(network(), lambda vocab=vocab: DraftModel(tiny(0, vocab=vocab)))


def test_a_model_whose_attention_pages_cannot_give_is_refused() -> None:
    from models import model

    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM cannot be served: .* has no softcap"):
        Engine(model("gemma2, softcap", "eager"))
    broken = network()
    broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits over pages differ from those of its own forward by up to nan"):
        Engine(broken)


def test_a_long_prompt_is_read_in_pieces_while_nothing_else_runs() -> None:
    engine = Engine(network(), PromptLookup, pages=60)
    request = engine.submit(Request([5, 6, 7] * PIECE, 9))
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 1]
    engine.run()
    assert request.new == alone(request)


def test_a_request_waits_until_there_are_pages_for_it() -> None:
    engine = Engine(network(), slots=3, pages=7, page_size=8)
    first, second = (engine.submit(Request([3] * 20, 20)) for _ in range(2))
    engine.step()
    assert engine.running == [first] and list(engine.waiting) == [second]
    engine.run()
    assert first.new == second.new and len(first.new) == 20
    with pytest.raises(ValueError, match="together at most 51, got 52"):  # and five nodes of a draft
        engine.submit(Request([3] * 20, 32))


def test_penalties_and_biases_are_those_of_the_loop_beside_requests_without() -> None:
    engine = Engine(network(), PromptLookup, slots=4)
    plain, edited, biased = requests(0.9)[0], requests(0.9)[3], requests(0.9)[5]
    edited.repetition, edited.frequency, edited.presence = 1.3, 0.4, 0.2
    biased.bias = {7: -float("inf"), 3: 2.0}
    for request in (plain, edited, biased):
        engine.submit(request)
    engine.run()
    penalties = Edits(repetition=torch.tensor([1.3]), frequency=torch.tensor([0.4]), presence=torch.tensor([0.2]))
    biases = Edits(bias_ids=torch.tensor([[7, 3]]).int(), bias=torch.tensor([[-float("inf"), 2.0]]))
    assert plain.new == alone(plain)
    assert edited.new == alone(edited, edits=penalties) != alone(edited)
    assert biased.new == alone(biased, edits=biases) and 7 not in biased.new


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_grammar_restricts_its_own_request_alone(temperature: float, drafter: str) -> None:
    engine = Engine(network(), DRAFTERS[drafter], slots=4, pages=90)
    free, rising, other = requests(temperature)[0], requests(temperature)[4], requests(temperature)[3]
    rising.grammar = other.grammar = Letters()
    for request in (free, rising, other):
        engine.submit(request)
        engine.step()
    engine.run()
    assert free.new == alone(free)
    for request in (rising, other):
        letters = request.new[: request.new.index(0)]
        assert letters and letters == sorted(set(letters)) and max(letters) <= 9
        assert request.new == alone(request, grammar=Letters())


def test_a_grammar_that_fails_ends_its_request_and_no_other() -> None:
    class Broken(Letters):
        def matcher(self) -> Broken:
            return Broken()

        def fill(self, row: Tensor) -> None:
            if len(self.taken) == self.limit:
                raise RuntimeError("too complex\n<state>")
            super().fill(row)

        limit = 2

    class Forgetful(Letters):
        def matcher(self) -> Forgetful:
            return Forgetful()

        def accept(self, token: int) -> bool:
            return False

    engine = Engine(network(), PromptLookup, slots=4, pages=90)
    fine, broken, forgetful = requests(0.9)[0], requests(0.9)[3], requests(0.9)[5]
    broken.grammar, forgetful.grammar = Broken(), Forgetful()
    for request in (fine, broken, forgetful):
        engine.submit(request)
    engine.run()
    assert fine.new == alone(fine)
    assert (broken.reason, broken.error) == ("failed", "its grammar failed: too complex")
    assert forgetful.reason == "failed" and "which its own mask allowed" in forgetful.error
    assert engine.pages.used == 0


@pytest.mark.parametrize("drafter", ["copies", "trees"])
def test_log_probabilities_are_those_of_the_models_own_logits(drafter: str) -> None:
    engine, model = Engine(network(), DRAFTERS[drafter], slots=2), network()
    asks, other = requests(0.9)[4], requests(0.9)[0]
    asks.top_logprobs = 3
    engine.submit(other)
    engine.submit(asks)
    told = [p for _ in range(40) for p in engine.step()]
    listed = [x for p in told if p.request is asks for x in p.logprobs]
    assert not any(p.logprobs for p in told if p.request is other)
    with torch.no_grad():
        logits = model(torch.tensor([asks.tokens])).logits[0, len(asks.prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert len(listed) == len(asks.new) == 15
    for i, (token, found) in enumerate(zip(asks.new, listed, strict=True)):
        assert found.logprob == pytest.approx(float(expected[i, token]), abs=1e-4)
        best = expected[i].topk(3)
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_the_end_token_ends_a_text_inside_accepted_drafts() -> None:
    engine = Engine(network(), PromptLookup)
    free = engine.submit(Request([7, 8], 24))
    engine.run()
    for eos in set(free.new):
        ending = Engine(network(), PromptLookup)
        ending.ends = [eos]
        request = ending.submit(Request([7, 8], 24))
        told = texts(ending, [request])
        end = free.new.index(eos) + 1
        assert request.new == free.new[:end] == told[request]
        assert request.reason == "stop"


def test_a_request_without_a_token_to_draw_fails_and_nobody_else_does() -> None:
    """The rows of one token are NaN: the text that comes to it fails, and the pages it used are not shared."""
    model = network()
    engine = Engine(model, PromptLookup, slots=2, pages=40)
    model.model.embed_tokens.weight[22] = float("nan")
    bad, good = Request([*[7] * 20, 22], 24), Request([7] * 20, 24)
    for request in (bad, good, later := Request([*[7] * 20, 8], 4)):
        engine.submit(request)
    engine.run()
    assert bad.reason == "failed" and "BAD_TARGET" in bad.error and not bad.new
    assert good.reason == later.reason == "length"
    assert good.new == generate(network(), None, [good.prompt], sampling=Sampling.full(1, temperature=0.0),
                                max_new_tokens=24, stop=()).tokens[0]  # fmt: skip
    assert engine.pages.used == 0


METHODS = ("begin", "prefill", "join", "draft", "commit", "end")
FAULTS = [
    *((method, when) for when in ("once", "always") for method in METHODS),
    ("prefill", "of one request"),
    ("draft", "of one request"),
]


@pytest.mark.parametrize(("method", "when"), FAULTS)
@pytest.mark.parametrize("drafter", ["suffixes", "a model's chains", "trees"])
def test_a_drafter_that_raises_costs_drafts_and_no_text(
    drafter: str, method: str, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arriving = requests(0.9)
    faults = []

    def broken() -> Drafter:
        made = DRAFTERS[drafter]()
        assert made is not None
        call = getattr(made, method)

        def failing(sequences: Any, *arguments: Any, **more: Any) -> Any:
            is_poison = any(row[: len(arriving[3].prompt)] == arriving[3].prompt for row in sequences.rows)
            if when == "always" or (when == "once" and not faults) or (when == "of one request" and is_poison):
                faults.append(method)
                raise RuntimeError("no idea")
            return call(sequences, *arguments, **more)

        monkeypatch.setattr(made, method, failing)
        return made

    engine = Engine(network(), broken, draft_length=FixedLength(3), slots=3, pages=90, page_size=8)
    for request in arriving[:2]:
        engine.submit(request)
    for late in arriving[2:]:
        engine.step()
        engine.submit(late)
    engine.run()
    for request in arriving:
        assert request.reason == "length" and request.new == alone(request)
    assert engine.faults == len(faults) >= 1
    assert sum(record.exc_info is not None for record in caplog.records) == len(faults)
    later = engine.submit(Request([5, 6] * 10, 40))
    drafted = [progress.drafted for _ in range(later.limit) for progress in engine.step()]
    assert later.new == alone(later) and any(drafted) == (when != "always" or method == "end")
    assert when != "of one request" or not any(arriving[3].accepted)
    assert method == "end" or engine.faults <= MOST_FAULTS
    assert engine.pages.used == 0


def test_a_drafter_that_has_failed_often_is_tried_again_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("specdec_loop.serve.group.time.monotonic", lambda: now[0])
    is_broken = [True]

    class Broken(PromptLookup):
        def draft(self, sequences: Any, length: int) -> Any:
            if is_broken[0]:
                raise RuntimeError("no idea")
            return super().draft(sequences, length)

    engine = Engine(network(), Broken)

    def accepted() -> int:
        request = engine.submit(Request([5, 6] * 10, 20))
        engine.run()
        assert request.new == alone(request)
        return sum(request.accepted)

    for faults in (1, 2, 3, 3, 3):
        assert accepted() == 0 and engine.faults == faults
    now[0] += REST
    assert accepted() == 0 and engine.faults == 4  # one more fault: it rests again
    is_broken[0] = False
    assert accepted() == 0
    now[0] += REST
    assert accepted() > 0
    is_broken[0] = True  # a text was completed: the count begins anew
    for faults in (5, 6, 7, 7):
        assert accepted() == 0 and engine.faults == faults


def test_a_drafter_that_fails_beside_a_grammar_leaves_its_matcher_where_it_was() -> None:
    class Broken(DraftModel):
        def draft(self, sequences: Any, length: int) -> Any:
            with self.grammars.chain():
                self.grammars.follow(torch.tensor([[0]] * sequences.batch))
                raise RuntimeError("no idea")

    engine = Engine(network(), lambda: Broken(network(1)))
    free, rising = engine.submit(requests(0.9)[0]), requests(0.9)[4]
    rising.grammar = Letters()
    engine.submit(rising)
    engine.run()
    assert free.new == alone(free) and rising.new == alone(rising, grammar=Letters())
    assert engine.faults == 1


@pytest.mark.parametrize("fault", ["its grammar", "its counts"])
def test_a_request_that_cannot_begin_fails_with_the_other_choices_of_its_prompt(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Letters):
        def matcher(self) -> Broken:
            raise MemoryError("no room")

    engine = Engine(network(), PromptLookup, slots=1)
    bad = Request([7, 8], 9, grammar=Broken() if fault == "its grammar" else None)
    other, fine = Request([7, 8], 9, leader=bad), requests(0.9)[0]
    begin = engine._verifier.begin

    def failing(request: Request) -> None:
        begin(request)
        if request is bad:
            raise MemoryError("no room")

    monkeypatch.setattr(engine._verifier, "begin", failing)
    for request in (fine, bad, other, last := requests(0.9)[3]):
        engine.submit(request)
    told = texts(engine, [fine, bad, other, last])
    for request in (bad, other):
        assert (request.reason, request.error, request.new) == ("failed", "MemoryError: no room", [])
    for request in (fine, last):
        assert request.reason == "length" and request.new == told[request] == alone(request)
    assert engine.pages.used == 0


@pytest.mark.parametrize("drafter", ["plain", "a model's chains", "trees"])
def test_a_forward_that_raises_for_one_request_ends_that_one_alone(drafter: str) -> None:
    """While it reads its prompt, at the end of it, and behind it."""
    model = network()
    engine = Engine(model, DRAFTERS[drafter], slots=4, pages=200, page_size=8)
    arriving, forward = requests(0.9), model.forward

    def failing(ids: Tensor, position_ids: Tensor, **arguments: Any) -> Any:
        if position_ids.max() > 400:
            raise RuntimeError("out of memory")
        return forward(ids, position_ids=position_ids, **arguments)

    model.forward = failing
    reading, read, grown = (Request([7] * n, 40, 0.9) for n in (700, 405, 380))
    for request in (reading, *arriving[:2], read, grown, *arriving[2:]):
        engine.submit(request)
    engine.run()
    for request in arriving:
        assert request.reason == "length" and request.new == alone(request)
    for request in (reading, read, grown):
        assert (request.reason, request.error) == ("failed", "RuntimeError: out of memory")
    assert reading.new == read.new == [] and 10 < len(grown.new) <= 22
    assert grown.new == alone(grown)[: len(grown.new)]
    assert engine.pages.used == 0 and engine.faults == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_draft_is_verified_that_a_limit_would_cut_off(drafter: str) -> None:
    engine = Engine(network(), DRAFTERS[drafter], draft_length=FixedLength(4), slots=3)
    for limit in (2, 3, 9):
        engine.submit(Request([5, 6] * 10, limit))
    left = {request: request.limit for request in engine.waiting}
    while left:
        for progress in engine.step():
            assert drafter == "trees" or (progress.drafted or 0) < left[progress.request]
            left[progress.request] -= len(progress.tokens)
            if progress.reason:
                assert left.pop(progress.request) == 0


def test_cancelled_requests_leave_at_once_and_give_back_their_pages() -> None:
    engine = Engine(network(), slots=1)
    running, waiting = engine.submit(Request([7, 8], 24)), engine.submit(Request([7, 8], 24))
    engine.step()
    for request in (waiting, running, running):
        engine.cancel(request)
    assert running.reason == waiting.reason == "cancelled" and engine.pages.used == 0
    assert engine.step() == []
    last = engine.submit(Request([7, 8], 24))
    engine.run()
    assert last.reason == "length"


def test_drafts_under_a_budget_go_to_those_that_accept_them() -> None:
    engine = Engine(network(), PromptLookup, slots=3, budget=4, draft_length=FixedLength(4))
    loops, others = Request([5, 6] * 10, 40), requests(1.0)
    for request in (loops, others[3], others[0]):
        engine.submit(request)
    told = [p for _ in range(60) for p in engine.step()]
    given: dict[int, int] = {}
    for progress in told:
        if progress.drafted:
            given[id(progress.request)] = given.get(id(progress.request), 0) + progress.drafted
    assert loops.new == alone(loops)
    assert given[id(loops)] > max(given.get(id(r), 0) for r in (others[3], others[0]))


class Given(StepTimes):
    """A token beyond the first takes so many steps."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self._slope = slope

    def table(self, batch: int, budget: int) -> torch.Tensor:
        return 1 + self._slope * torch.arange(batch - 1, batch + budget)


@pytest.mark.parametrize(("slope", "drafts"), [(0.0, True), (10.0, False)])
def test_drafts_are_verified_as_far_as_the_time_of_steps_lets_them_pay(slope: float, drafts: bool) -> None:
    engine = Engine(network(), PromptLookup, slots=2, draft_length=AdaptiveLength(4))
    engine._allotment.times = Given(slope)
    loops = [Request([5, 6] * 10, 40), Request([7, 8, 9] * 7, 40)]
    for request in loops:
        engine.submit(request)
    given = sum(p.drafted or 0 for _ in range(60) for p in engine.step())
    assert (given > 0) == drafts
    assert [request.new for request in loops] == [alone(request) for request in loops]


def test_what_a_request_accepts_is_trusted_as_far_as_it_is_known() -> None:
    good, bad, new = (Request([1]) for _ in range(3))
    assert acceptances([new]) == [0.5]
    for _ in range(60):
        good.learn(4, 4)
        bad.learn(4, 0)
    shares = acceptances([good, bad, new])
    assert shares[0] > 0.9 and shares[1] < 0.4 and shares[1] < shares[2] < shares[0]
    for _ in range(100):  # no drafts: what was seen fades, and a trial comes
        bad.learn(0, 0)
    shares = acceptances([good, bad, new])
    assert shares[1] == pytest.approx(shares[2], abs=0.01)


def test_an_adaptive_length_learns_from_steps_without_prompts() -> None:
    lengths = AdaptiveLength(6, cost=0.01)
    engine = Engine(network(), PromptLookup, slots=2, draft_length=lengths)
    request = engine.submit(Request([5, 6] * 10, 60))
    engine.run()
    assert request.new == alone(request)
    assert lengths.acceptance != 0.5


def test_texts_that_end_teach_the_drafters_of_other_slots() -> None:
    engine = Engine(network(), lambda: SuffixDecoding(factor=2.0), slots=2, draft_length=FixedLength(8))
    first = engine.submit(Request([3, 4, 11, 2], 30))
    engine.run()
    again, other = engine.submit(Request([3, 4, 11, 2], 30)), engine.submit(Request([3, 4, 11, 2], 30))
    engine.run()
    assert again.new == other.new == first.new
    assert len(again.accepted) < len(first.accepted) > len(other.accepted)  # one of both has another slot


@pytest.mark.parametrize("drafter", ["copies", "trees"])
def test_a_common_prefix_is_run_once(drafter: str) -> None:
    engine = Engine(network(), DRAFTERS[drafter], slots=3, page_size=4)
    prompt = [random.Random(2).randrange(VOCAB) for _ in range(21)]
    leader = engine.submit(Request(prompt, 9, 0.9, seed=1))
    others = [engine.submit(Request(prompt, 9, 0.9, seed=s, leader=leader)) for s in (2, 3)]
    engine.run()
    assert leader.lease.shared == 0 and [r.lease.shared for r in others] == [20, 20]
    for request in (leader, *others):
        assert request.new == alone(request)
    # The next turn of a conversation finds its text so far; the last token's row is never shared.
    turn = engine.submit(Request([*leader.tokens, 5, 6], 9, 0.9, seed=1))
    same = engine.submit(Request(prompt[:20], 3))
    engine.run()
    assert turn.lease.shared == 28 and same.lease.shared == 16
    assert turn.new == alone(turn) and same.new == alone(same)
    assert engine.pages.used == 0
