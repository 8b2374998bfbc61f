"""A cache kept over the turns of a conversation: less is run, and the texts are the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from head_models import DRAFTERS, feature_head
from models import model
from texts import assert_same, prompts
from torch import Tensor

from specdec_kernels import Sampling
from specdec_loop import DraftModel, HeadChain, Lookahead, PrefixCache, PromptLookup, generate
from specdec_loop.drafters import Drafter
from specdec_loop.tree_cache.layer import Lengths


class Counting:
    """A model that notes how many tokens each forward runs."""

    def __init__(self, network: Any) -> None:
        self.network, self.widths = network, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def __call__(self, ids: torch.Tensor, **more: Any) -> Any:
        self.widths.append(ids.shape[1])
        return self.network(ids, **more)


def turns(drafter: Drafter | None, past: PrefixCache | None, target: Any, temperature: float) -> list[list[list[int]]]:
    """Three turns of three conversations; in the second turn one of them goes back behind what was said."""
    sampling, said = Sampling.full(3, temperature=temperature), prompts(3)
    texts = []
    for turn, new in enumerate(([], [[4, 5], [6], [7, 8, 9]], [[1], [2, 3], [5] * 9])):
        if turn == 1:
            said[2] = said[2][:1]
        said = [row + more for row, more in zip(said, new or [[]] * 3, strict=True)]
        result = generate(target, drafter, said, sampling=sampling, max_new_tokens=10, seed=turn, past=past)
        texts.append(result.tokens)
        said = [row + tokens for row, tokens in zip(said, result.tokens, strict=True)]
    return texts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "make", [lambda: None, lambda: DraftModel(model(seed=1)), PromptLookup, lambda: Lookahead(3, 4, 2)]
)
def test_turns_say_the_same_with_and_without_past(make: Any, temperature: float) -> None:
    assert turns(make(), PrefixCache(200), model(), temperature) == turns(make(), None, model(), temperature)


def test_only_what_is_new_is_run() -> None:
    target, past, sampling = Counting(model()), PrefixCache(300), Sampling.full(1, temperature=0.0)
    start = list(range(1, 41))
    first = generate(target, None, [start], sampling=sampling, max_new_tokens=6, past=past).tokens[0]
    assert target.widths == [40] + [1] * 5
    target.widths.clear()
    generate(target, None, [start + first + [7, 8, 9]], sampling=sampling, max_new_tokens=6, past=past)
    assert target.widths == [4] + [1] * 5  # the last token said, which had no row yet, and three new ones
    target.widths.clear()
    generate(target, None, [[*start[:20], 3]], sampling=sampling, max_new_tokens=6, past=past)
    assert target.widths == [1] * 6  # all but the last token was there


def test_a_request_that_shares_little_does_not_push_others_out_of_the_buffers() -> None:
    """One keeps 60 rows, the other has to run 60: together they exceed the capacity, so the first runs some again."""
    past, sampling = PrefixCache(80), Sampling.full(2, temperature=0.0)
    long = [list(range(1, 61)), [5, 6, 7]]
    generate(model(), None, long, sampling=sampling, max_new_tokens=4, past=past)
    again = [[*range(1, 61), 9], [9] * 61]
    got = generate(model(), None, again, sampling=sampling, max_new_tokens=10, past=past).tokens
    want = generate(model(), None, again, sampling=sampling, max_new_tokens=10).tokens
    assert_same(got, want, model(), again, sampling)


def test_after_a_stop_the_past_ends_where_the_text_does() -> None:
    past, sampling, start = PrefixCache(100), Sampling.full(2, temperature=0.0), prompts(2)
    free = generate(model(), None, start, sampling=sampling, max_new_tokens=12).tokens
    known = DraftModel(model())
    first = generate(model(), known, start, sampling=sampling, max_new_tokens=12, stop=[free[0][2]], past=past).tokens
    again = [row + tokens + [3, 4] for row, tokens in zip(start, first, strict=True)]
    got = generate(model(), known, again, sampling=sampling, max_new_tokens=12, past=past).tokens
    assert_same(
        got, generate(model(), None, again, sampling=sampling, max_new_tokens=12).tokens, model(), again, sampling
    )


def test_a_forward_gone_bad_leaves_no_row() -> None:
    """Request 0 is flagged in a step without drafts; its next turn is that of a model that never failed."""
    network, forwards = copy.deepcopy(model()), []

    def spoil(module: Any, args: Any, out: Tensor) -> Tensor:
        forwards.append(1)
        return out.index_fill(0, torch.tensor([0]), torch.nan) if len(forwards) == 3 else out

    network.get_input_embeddings().register_forward_hook(spoil)
    past, sampling, start = PrefixCache(64), Sampling.full(2, temperature=0.0), [[5, 6, 7, 8], [3, 4, 2, 6, 7, 8, 9]]
    first = generate(network, None, start, sampling=sampling, max_new_tokens=6, past=past)
    assert first.status == [1, 0] and len(first.tokens[0]) == 2
    again = [[*row, *tokens, 9] for row, tokens in zip(start, first.tokens, strict=True)]
    got = generate(network, None, again, sampling=sampling, max_new_tokens=6, past=past)
    assert got.status == [0, 0]
    want = generate(model(), None, again, sampling=sampling, max_new_tokens=6).tokens
    assert_same(got.tokens, want, model(), again, sampling)


def test_a_drafter_that_reads_features_runs_the_whole_prompt() -> None:
    past, sampling, start = PrefixCache(100), Sampling.full(3, temperature=0.0), prompts(3)
    want = generate(model(), None, start, sampling=sampling, max_new_tokens=8).tokens
    for _ in range(2):
        drafter = DRAFTERS["EAGLE-1"]()
        got = generate(model(), drafter, start, sampling=sampling, max_new_tokens=8, past=past).tokens
        assert_same(got, want, model(), start, sampling)


def test_a_failed_call_leaves_nothing_behind() -> None:
    past, sampling, start = PrefixCache(100), Sampling.full(1, temperature=0.0), [[1, 2, 3, 4]]
    generate(model(), None, start, sampling=sampling, max_new_tokens=8, past=past)

    def fail(b: int, new: list[int], accepted: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model(), None, [[1, 2, 9, 9]], sampling=sampling, max_new_tokens=8, past=past, streamer=fail)
    got = generate(model(), None, start, sampling=sampling, max_new_tokens=8, past=past).tokens
    assert got == generate(model(), None, start, sampling=sampling, max_new_tokens=8).tokens


def test_misuse_is_named() -> None:
    past, sampling = PrefixCache(20), Sampling.full(1, temperature=0.0)
    generate(model(), None, [[1]], sampling=sampling, max_new_tokens=8, past=past)
    with pytest.raises(ValueError, match=r"past must be of a capacity of at least \d+, got 20"):
        generate(model(), None, [[1]], sampling=sampling, max_new_tokens=30, past=past)
    with pytest.raises(ValueError, match="PrefixCache: capacity must be an int >= 1, got 0"):
        PrefixCache(0)
    with pytest.raises(ValueError, match="past must be used with the model"):
        generate(model(seed=1), None, [[1]], sampling=sampling, max_new_tokens=8, past=past)
    with pytest.raises(ValueError, match="past must be used with 1 requests, got 2"):
        generate(model(), None, [[1]] * 2, sampling=Sampling.full(2), max_new_tokens=8, past=past)


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_asks_a_gpu_for_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache that believes itself on a GPU texts are the same, and lengths are read where a past is opened."""

    def say(drafter: Drafter | None) -> list[list[int]]:
        mixed = Sampling(torch.tensor([0.0, 0.8, 0.0, 1.0, 0.5, 0.0, 1.3]))
        return generate(model(), drafter, prompts(7), sampling=mixed, max_new_tokens=24).tokens

    want, reads = say(DRAFTERS[name]()), []
    begin, read = Lengths.__init__, Lengths.read
    monkeypatch.setattr(Lengths, "read", lambda lengths: reads.append(1) or read(lengths))

    def on_gpu(lengths: Lengths, *args: Any) -> None:
        begin(lengths, *args)
        lengths.is_on_host = False

    monkeypatch.setattr(Lengths, "__init__", on_gpu)
    say(None)
    opened = len(reads)
    reads.clear()
    assert say(DRAFTERS[name]()) == want and len(reads) == opened


def test_what_a_call_keeps_serves_outside_of_it() -> None:
    """`generate` runs in inference mode, whose tensors neither gradients nor writes from outside may touch."""
    target, past, sampling = model(), PrefixCache(64), Sampling.full(1, temperature=0.0)
    head = feature_head("mtp", target)
    result = generate(target, HeadChain(head), [[5, 6, 7]], sampling=sampling, max_new_tokens=6, stop=(), past=past)
    assert past.cache is not None
    text = torch.tensor([[5, 6, 7, *result.tokens[0]]])
    with torch.no_grad():
        logits = target(text[:, -1:], past_key_values=past.cache).logits
        past.cache.commit(0)
        torch.testing.assert_close(logits[:, -1], target(text).logits[:, -1])
    features = torch.randn(1, 3, target.config.hidden_size)
    head.requires_grad_(True)
    head(text[:, :3], features, torch.arange(3)[None], None, None).sum().backward()
    assert any(p.grad is not None for p in head.parameters())
