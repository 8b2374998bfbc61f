"""The example engine: requests come and go, and none of them can tell from its text."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.engine import Engine, Request, lookup
from specdec_kernels import Sampling
from specdec_loop import generate

VOCAB = 23


def network(attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def requests(temperature: float, count: int = 7) -> list[Request]:
    """Prompts of one token to several pieces of the engine's; limits that end early and late."""
    rng = random.Random(1)
    lengths, limits = [1, 5, 90, 2, 70, 9, 3], [20, 1, 12, 24, 15, 18, 2]
    prompts = [[rng.choice([rng.randrange(VOCAB), 7, 8]) for _ in range(n)] for n in lengths]
    return [Request(prompts[i], limits[i], temperature, top_k=9, top_p=0.95, seed=5 + i) for i in range(count)]


def alone(request: Request) -> list[int]:
    """Text of the decoding loop."""
    sampling = Sampling.full(1, temperature=request.temperature, top_k=9, top_p=0.95)
    how = {"sampling": sampling, "seed": request.seed, "max_new_tokens": request.limit, "stop": ()}
    return generate(network(), None, [request.prompt], **how).tokens[0]


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_text_does_not_depend_on_companions_that_come_and_go(temperature: float, drafts: int) -> None:
    engine = Engine(network(), slots=3, pages=40, page_size=8, drafts=drafts)
    engine.ends = set()
    arriving = requests(temperature)
    for request in arriving[:2]:
        engine.submit(request)
    finished = []
    for late in arriving[2:]:
        finished += engine.step() + engine.step()
        assert len(engine.running) <= 3
        engine.submit(late)
    while engine.waiting or engine.running:
        finished += engine.step()
    assert sorted(map(id, finished)) == sorted(map(id, arriving))
    for request in arriving:
        assert request.text == alone(request)
    kept = [sum(request.accepted) for request in arriving]
    assert (sum(kept) > 0) == (drafts > 0)
    assert all(len(r.accepted) + n == r.limit for r, n in zip(arriving, kept, strict=True))
    assert sorted(engine.pages.free) == list(range(40)) and engine.promised == 0  # every page has come back
    assert bool((engine.pages.table == -1).all())


def test_a_request_waits_until_there_are_pages_for_it() -> None:
    engine = Engine(network(), slots=3, pages=6, page_size=8)
    engine.ends = set()
    first, second = (engine.submit(Request([3] * 20, 20)) for _ in range(2))
    engine.step()
    assert engine.running == [first] and list(engine.waiting) == [second]
    engine.run()
    assert first.text == second.text and len(first.text) == 20
    with pytest.raises(ValueError, match="together at most 48, got 49"):
        engine.submit(Request([3] * 20, 29))


def test_the_end_token_ends_a_text_inside_accepted_drafts() -> None:
    engine = Engine(network())
    engine.ends = set()
    free = engine.submit(Request([7, 8], 24))
    engine.run()
    for eos in set(free.text):
        ending = Engine(network())
        ending.ends = {eos}
        request = ending.submit(Request([7, 8], 24))
        ending.run()
        assert request.text == free.text[: free.text.index(eos) + 1]


def test_a_request_without_a_token_to_draw_fails_and_leaves() -> None:
    engine = Engine(network(), pages=20)
    engine.model.lm_head.weight.fill_(float("nan"))
    request = engine.submit(Request([7, 8], 24))
    engine.run()
    assert request.is_failed and request.is_finished and not request.text
    assert len(engine.pages.free) == 20


def test_lookup_copies_what_followed_the_longest_match() -> None:
    assert lookup([1, 2, 3, 4, 9, 2, 3], 2) == [4, 9]
    assert lookup([5, 5], 3) == [5]
    assert lookup([1, 2], 3) == [] == lookup([5, 5], 0)
