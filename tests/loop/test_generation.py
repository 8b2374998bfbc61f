"""`generate`: the text of plain decoding whatever is drafted, the target distribution, limits, stops, errors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_models import feature_head
from model_families import FAMILIES, LONGROPE, build
from models import VOCAB, Sequential, model
from texts import Scripted, assert_same, prompts

from specdec_kernels import Sampling, Status
from specdec_loop import (
    AdaptiveLength,
    Datastore,
    DraftModel,
    Generation,
    Lookahead,
    PromptLookup,
    Retrieval,
    SuffixDecoding,
    generate,
)
from specdec_loop.drafters import Draft, Drafter, EagleDynamicTree, SuffixOr
from specdec_loop.sequences import Sequences

TOKENS = 24  # several steps of any drafter, and n-grams that come back
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "draft model": lambda: DraftModel(model(seed=1)),
    "draft model or suffix": lambda: SuffixOr(DraftModel(model(seed=1))),
    "the target itself": lambda: DraftModel(model()),
    "prompt lookup": PromptLookup,
    "suffix decoding": SuffixDecoding,
    "lookahead": lambda: Lookahead(3, 5, 2),
    "retrieval": lambda: Retrieval(Datastore.build(prompts() + known_texts()), shortest=1, candidates=6),
}
MIXED = Sampling(torch.tensor([0.0, 0.8, 0.0, 1.0, 0.5, 0.0, 1.3]), top_k=torch.tensor([0, 0, 5, 20, 0, 0, 3]).int())


@functools.cache
def known_texts() -> list[list[int]]:
    """Some of what will be said: greedy and sampled."""
    runs = [run(None, prompts(), Sampling.full(7, temperature=t)) for t in (0.0, 0.8)]
    return [tokens for result in runs for tokens in result.tokens[::2]]


def sampling_of(kind: str, batch: int) -> Sampling:
    if kind == "mixed":
        return Sampling(*(None if x is None else x[:batch] for x in MIXED))
    return Sampling.full(batch, temperature=0.0 if kind == "greedy" else 0.8)


def run(drafter: Drafter | None, starts: list[list[int]], sampling: Sampling, **more: Any) -> Generation:
    more = {"max_new_tokens": TOKENS, "seed": 3, **more}
    return generate(model(), drafter, starts, sampling=sampling, **more)


def plain(starts: list[list[int]], sampling: Sampling, **more: Any) -> list[list[int]]:
    return run(None, starts, sampling, **more).tokens


def assert_plain(result: Generation, starts: list[list[int]], sampling: Sampling, **more: Any) -> None:
    assert_same(result.tokens, plain(starts, sampling, **more), model(), starts, sampling, more.get("seed", 3))


def greedy_text(start: list[int], count: int) -> list[int]:
    alone, tokens, fed = Sequential(model()), [], start
    for _ in range(count):
        tokens.append(int(alone.feed(fed)[-1].argmax()))
        fed = tokens[-1:]
    return tokens


class Long(Drafter):
    """Drafts of the full length in every step."""

    def draft(self, sequences: Sequences, length: int) -> Draft:
        return Draft(sequences.last(1).expand(-1, length).contiguous())


class Outside(Drafter):
    """Drafts what is no id of the target."""

    def draft(self, sequences: Sequences, length: int) -> Draft:
        return Draft(torch.full((sequences.batch, length), VOCAB))


# --- the text


def test_plain_decoding_is_greedy_decoding() -> None:
    starts = prompts(3)
    want = [greedy_text(start, TOKENS) for start in starts]
    assert_same(plain(starts, sampling_of("greedy", 3)), want, model(), starts, sampling_of("greedy", 3))


@pytest.mark.parametrize("batch", [1, 7], ids=["alone", "ragged batch"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_that_of_plain_decoding(name: str, kind: str, batch: int) -> None:
    starts, sampling = prompts(batch), sampling_of(kind, batch)
    assert_plain(run(DRAFTERS[name](), starts, sampling), starts, sampling)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rule_greedy_ignores_the_temperature(name: str) -> None:
    starts = prompts()
    got = run(DRAFTERS[name](), starts, sampling_of("sampled", 7), rule="greedy")
    assert_plain(got, starts, sampling_of("greedy", 7))


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("family", ["qwen3, some layers slide", "gemma2, softcap"])
def test_other_families_keep_the_text(family: str, kind: str) -> None:
    target, sampling = model(family, "eager"), sampling_of(kind, 7)
    starts = prompts()
    want, *rest = (
        generate(target, drafter, starts, sampling=sampling, max_new_tokens=TOKENS).tokens
        for drafter in (None, DraftModel(model(seed=1)), Lookahead(3, 4, 2), PromptLookup())
    )
    for got in rest:
        assert_same(got, want, target, starts, sampling)


def test_a_request_does_not_depend_on_its_batch() -> None:
    starts, seeds = prompts(), torch.arange(7) * 11
    for rule in ("match", "ratio", "block"):
        together = run(DraftModel(model(seed=1)), starts, MIXED, seed=seeds, rule=rule).tokens
        alone = [
            run(
                DraftModel(model(seed=1)),
                [starts[b]],
                Sampling(*(None if x is None else x[b : b + 1] for x in MIXED)),
                seed=seeds[b : b + 1],
                rule=rule,
            ).tokens[0]
            for b in range(7)
        ]
        assert together == alone, rule


def test_draft_length_and_padding_do_not_change_the_text() -> None:
    starts, sampling = prompts(), sampling_of("sampled", 7)
    want = plain(starts, sampling)
    width = max(map(len, starts))
    left = torch.tensor([[0] * (width - len(s)) + s for s in starts])
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in starts])
    for length in (1, 2, 7, AdaptiveLength(5)):
        got = run(DraftModel(model(seed=1)), left, sampling, attention_mask=mask, draft_length=length)
        assert_same(got.tokens, want, model(), starts, sampling, 3)


# --- drafts that are always right, always wrong, empty


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_right_drafts_are_all_accepted(rule: str) -> None:
    starts, sampling = prompts(), sampling_of("greedy", 7)
    want = plain(starts, sampling, max_new_tokens=25)
    known = [start + text for start, text in zip(starts, want, strict=True)]
    result = run(Scripted(known), starts, sampling, draft_length=4, max_new_tokens=25, rule=rule)
    assert result.tokens == want
    for request in result.statistics:
        assert request.accepted == [4] * 5 and request.tokens == 25
        assert request.acceptance_by_position() == [1.0] * 4


def test_wrong_drafts_cost_steps_and_nothing_else() -> None:
    starts, sampling = prompts(), sampling_of("greedy", 7)
    want = plain(starts, sampling)
    known = [start + text for start, text in zip(starts, want, strict=True)]
    result = run(Scripted(known, shift=1), starts, sampling)
    assert result.tokens == want
    assert all(request.accepted == [0] * (TOKENS - 1) for request in result.statistics)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_drafts_outside_the_vocabulary_are_flagged_and_change_no_text(kind: str) -> None:
    """They come from a datastore, or a user's drafter, of another tokenizer."""
    starts, sampling = prompts(2), sampling_of("greedy", 2)
    want = plain(starts, sampling)
    store = Datastore.build([[token, VOCAB] for token in range(VOCAB)])
    drafter = Outside() if kind == "chain" else Retrieval(store, shortest=1)
    result = run(drafter, starts, sampling)
    assert result.tokens == want and result.status == [Status.BAD_ID] * 2


def test_empty_drafts_are_plain_decoding() -> None:
    starts, sampling = prompts(), sampling_of("sampled", 7)
    result = run(Scripted(starts), starts, sampling)
    assert_plain(result, starts, sampling)
    assert all(request.drafted == [0] * (TOKENS - 1) for request in result.statistics)


# --- where a text ends


def test_eos_inside_an_accepted_prefix_ends_the_text() -> None:
    starts, sampling = prompts(), sampling_of("sampled", 7)
    free = plain(starts, sampling)
    known = [start + text for start, text in zip(starts, free, strict=True)]
    for position in (0, 2, 5):
        eos = free[0][position]
        want = [text[: text.index(eos) + 1] if eos in text else text for text in free]
        for drafter in (None, Scripted(known), DraftModel(model()), Lookahead(3, 5, 2)):
            assert run(drafter, starts, sampling, stop=[eos], draft_length=6).tokens == want


def test_eos_of_the_model_is_the_default() -> None:
    starts, sampling = prompts(), sampling_of("greedy", 7)
    free = plain(starts, sampling)
    target = model()
    target.generation_config.eos_token_id = [free[1][3], free[3][2]]
    try:
        got = plain(starts, sampling)
    finally:
        target.generation_config.eos_token_id = None
    assert got == plain(starts, sampling, stop=[free[1][3], free[3][2]])
    assert len(got[1]) <= 4 and len(got[3]) <= 3


@pytest.mark.parametrize("length", [1, 5])
def test_stop_sequences_end_a_text_wherever_steps_cut_them(length: int) -> None:
    starts, sampling = prompts(), sampling_of("sampled", 7)
    free = plain(starts, sampling)
    known = [start + text for start, text in zip(starts, free, strict=True)]
    stop = free[4][6:9]
    want = [next((t[:i] for i in range(3, len(t) + 1) if t[i - 3 : i] == stop), t) for t in free]
    assert len(want[4]) <= 9
    for drafter in (None, Scripted(known), Lookahead(3, 5, 2)):
        assert run(drafter, starts, sampling, stop=[stop], draft_length=length).tokens == want


def test_a_stop_sequence_in_the_prompt_does_not_end_the_text() -> None:
    start, sampling = [5, 6, 7], sampling_of("greedy", 1)
    first = plain([start], sampling)[0][0]
    for stop in ([6, 7], [7, first]):
        assert plain([start], sampling, stop=[stop]) == plain([start], sampling)


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_text_is_longer_than_the_limit(name: str, limit: int) -> None:
    starts, sampling = prompts(), sampling_of("sampled", 7)
    got = run(DRAFTERS[name](), starts, sampling, max_new_tokens=limit, draft_length=4)
    assert got.tokens == [text[:limit] for text in plain(starts, sampling)]


def test_the_whole_context_can_be_used() -> None:
    start, sampling = [3] * 500, sampling_of("greedy", 1)
    assert len(run(PromptLookup(), [start], sampling, max_new_tokens=12, draft_length=8).tokens[0]) == 12
    with pytest.raises(ValueError, match="a model of at least 513 positions"):
        run(PromptLookup(), [start], sampling, max_new_tokens=13)


@pytest.mark.parametrize("family", ["GPT-2", "OPT", "CodeGen"])
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_behind_the_last_learned_position_do_not_matter(family: str, batch: int) -> None:
    """Such a model has a row for each position and no more; drafts lie behind the limit of the text."""
    network = build(FAMILIES[family][0], {**FAMILIES[family][1], "max_position_embeddings": 32})
    starts, sampling = [[3, 5, 3, 5, 3, 5, 3, 5], [3] * 7, [2] * 5][:batch], Sampling.full(batch, temperature=0.0)
    options = {"sampling": sampling, "max_new_tokens": 24, "stop": (), "draft_length": 8}
    want = generate(network, None, starts, **options).tokens
    small = build(FAMILIES[family][0], {**FAMILIES[family][1], "max_position_embeddings": 16})
    for drafter in (PromptLookup(), DraftModel(network), DraftModel(small), Lookahead(3, 5, 2), Long()):
        assert_same(generate(network, drafter, starts, **options).tokens, want, network, starts, sampling)


@pytest.mark.parametrize("length", [8, 20])
def test_a_text_within_which_the_rotary_angles_change_is_refused(length: int) -> None:
    """Cached keys would keep the angles of a short text: Phi-3's own generate then runs the whole text again."""
    rope = {**LONGROPE, "original_max_position_embeddings": 16}
    network = build("Phi3ForCausalLM", {"rope_parameters": rope, "original_max_position_embeddings": 16})
    start, sampling = [3 + i for i in range(length)], Sampling.full(1, temperature=0.0)
    options = {"sampling": sampling, "max_new_tokens": 12, "stop": (), "draft_length": 3}
    if length <= 16:
        with pytest.raises(ValueError, match=r"short enough for 16 positions, where the angles .* 'longrope' change"):
            generate(network, PromptLookup(), [start], **options)
        options["max_new_tokens"] = 16 - length - 2
    got = generate(network, PromptLookup(), [start], **options).tokens[0]
    want = network.generate(torch.tensor([start]), do_sample=False, max_new_tokens=options["max_new_tokens"])
    assert start + got == want[0].tolist()


def test_a_dynamic_rotary_table_must_not_grow() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    network = build("LlamaForCausalLM", {"rope_parameters": rope, "max_position_embeddings": 24})
    options = {"sampling": Sampling.full(1, temperature=0.0), "max_new_tokens": 12, "stop": ()}
    assert len(generate(network, PromptLookup(), [[3] * 12], **options, draft_length=1).tokens[0]) == 12
    with pytest.raises(ValueError, match=r"short enough for 24 positions, .* 'dynamic' change, got 25"):
        generate(network, PromptLookup(), [[3] * 12], **options, draft_length=2)


@pytest.mark.parametrize("family", ["Nemotron H", "Zamba 2", "BLOOM", "BERT"])
def test_a_model_that_is_not_served_is_refused_as_target_and_as_draft(family: str) -> None:
    network, sampling = build(*FAMILIES[family]), Sampling.full(1, temperature=0.0)
    refusal = rf"TreeCache: {type(network).__name__} is not served: "
    with pytest.raises(ValueError, match="^" + refusal):
        generate(network, None, [[3, 4]], sampling=sampling)
    with pytest.raises(RuntimeError, match=r"^generate: DraftModel.begin failed: " + refusal):
        generate(model(), DraftModel(network), [[3, 4]], sampling=sampling)


# --- what else comes back


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_streamer_is_given_every_token_once(name: str) -> None:
    starts, sampling = prompts(), sampling_of("sampled", 7)
    streamed: list[list[int]] = [[] for _ in starts]
    accepted = [0] * 7

    def streamer(b: int, new: list[int], count: int) -> None:
        streamed[b] += new
        accepted[b] += count
        assert len(new) - 1 <= count <= len(new)

    result = run(DRAFTERS[name](), starts, sampling, streamer=streamer)
    assert streamed == result.tokens
    for count, request in zip(accepted, result.statistics, strict=True):
        drawn = TOKENS - 1 - count  # the first token came with the prompt
        assert drawn in (request.steps, request.steps - 1)  # the last step may be cut before its draw
        assert len(request.children) == sum(request.accepted)


@pytest.mark.parametrize("name", [None, "draft model", "lookahead"])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_those_of_the_target(mode: str, name: str | None) -> None:
    starts, sampling = prompts(4), sampling_of("sampled", 4)
    drafter = None if name is None else DRAFTERS[name]()
    result = run(drafter, starts, sampling, logprobs=mode, rule="match")
    assert result.logprobs is not None
    for start, tokens, given in zip(starts, result.tokens, result.logprobs, strict=True):
        logits = model()(torch.tensor([start + tokens])).logits[0, len(start) - 1 : -1]
        rows = (logits / (0.8 if mode == "processed" else 1.0)).log_softmax(-1)
        want = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(given), want, atol=1e-4)


def test_statistics_add_up() -> None:
    starts, sampling = prompts(), sampling_of("sampled", 7)
    result = run(DraftModel(model()), starts, sampling, draft_length=3)
    for request, tokens in zip(result.statistics, result.tokens, strict=True):
        assert request.tokens == len(tokens) == TOKENS
        # The last step may be cut by the limit; the others took what they accepted and one drawn token.
        assert sum(a + 1 for a in request.accepted[:-1]) < TOKENS - 1 <= sum(a + 1 for a in request.accepted)
        assert all(a <= d <= 3 for a, d in zip(request.accepted, request.drafted, strict=True))
        assert 0 < request.seconds <= sum(result.seconds.values()) * 1.5
    assert set(result.seconds) == {"draft", "networks", "target", "verify", "commit"}
    assert all(seconds > 0 for seconds in result.seconds.values())


# --- what goes wrong


class Broken(Drafter):
    def __init__(self, method: str) -> None:
        self.method = method

    def draft(self, sequences: Sequences, length: int) -> Draft:
        self.fail("draft")
        return Draft(torch.full((sequences.batch, length), -1))

    def begin(self, *args: Any, **kwargs: Any) -> None:
        self.fail("begin")

    def commit(self, *args: Any) -> None:
        self.fail("commit")

    def end(self, *args: Any) -> None:
        self.fail("end")

    def fail(self, method: str) -> None:
        if method == self.method:
            raise ZeroDivisionError("no more ideas")


@pytest.mark.parametrize("method", ["begin", "draft", "commit", "end"])
def test_a_drafter_that_fails_is_named(method: str) -> None:
    with pytest.raises(RuntimeError, match=rf"Broken\.{method} failed: no more ideas") as raised:
        run(Broken(method), prompts(2), sampling_of("greedy", 2))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


class Misshapen(Drafter):
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def draft(self, sequences: Sequences, length: int) -> Draft:
        return Draft(self.ids)


@pytest.mark.parametrize("ids", [torch.zeros(3, 2).long(), torch.zeros(2, 9).long(), torch.zeros(2, 2)])
def test_a_draft_of_the_wrong_shape_is_named(ids: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"Misshapen\.draft failed: token_ids must be int64 \[2, at most 4 drafts\]"):
        run(Misshapen(ids), prompts(2), sampling_of("greedy", 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "ratios"}, "rule must be one of ratio, match, block"),
        ({"rule": "traversal"}, "rule must be one of"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an int >= 1, got 0"),
        ({"draft_length": 0}, "draft_length must be an int >= 1"),
        ({"input_ids": [[1], []]}, "prompts of at least one token, got an empty one"),
        ({"input_ids": [[1], [VOCAB]]}, f"ids in [0, {VOCAB}), got 1 to {VOCAB}"),
        ({"input_ids": torch.zeros(2, 3)}, "input_ids must be int32 or int64 [batch, length], got torch.float32"),
        ({"stop": [[]]}, "stop must be ids, sequences of ids and strings, none of them empty"),
        ({"input_ids": []}, "input_ids must be of at least one prompt, got none"),
        ({"input_ids": [[]]}, "prompts of at least one token, got an empty one"),
        (
            {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.zeros(2, 3)},
            "prompts of at least one token, got an empty one",
        ),
        ({"input_ids": "ab"}, "input_ids must be token ids of each prompt, such as [[5, 6, 7], [8]], got str"),
        ({"input_ids": ["ab", "c"]}, "input_ids must be token ids of each prompt, such as [[5, 6, 7], [8]], got 'ab'"),
        ({"input_ids": [5, 6]}, "input_ids must be token ids of each prompt, such as [[5, 6, 7], [8]], got 5"),
        ({"input_ids": [[1.0], [2.5]]}, "such as [[5, 6, 7], [8]], got torch.float32 [2, 1]"),
        ({"input_ids": [[1], [2**70]]}, "input_ids must be token ids of each prompt"),
        ({"stop": 5}, "stop must be a list of ids, sequences of ids and strings, got 5"),
        ({"stop": [1.5]}, "stop must be a list of ids, sequences of ids and strings, got [1.5]"),
        ({"seed": torch.zeros(3).long()}, "seed must be an int or int64 [2]"),
        ({"seed": None}, "seed must be an int of 64 bits or int64 [2], got None"),
        ({"seed": 2**63}, "seed must be an int of 64 bits or int64 [2], got 9223372036854775808"),
        ({"past": 5}, "past must be a PrefixCache or None, got int"),
        ({"edits": {"repetition": 1.2}}, "edits must be an Edits or None, got dict"),
        ({"streamer": 5}, "streamer must be a function (request, tokens, accepted) or None, got int"),
        ({"drafter": "lookahead"}, "drafter must be a Drafter or None, got str"),
        ({"target": "llama"}, "target must be a transformers causal LM, got str"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"target": model(), "drafter": PromptLookup(), "input_ids": [[1], [2]]}
    arguments = {**right, "sampling": Sampling.full(2), **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(arguments.pop("target"), arguments.pop("drafter"), arguments.pop("input_ids"), **arguments)


def test_trees_may_have_fewer_nodes_than_a_draft_may_be_long() -> None:
    start, sampling = [[1, 2, 3]], Sampling.full(1, temperature=0.0)
    want = plain(start, sampling)
    store = Datastore.build([[*range(1, 7)], want[0]])
    for drafter in (EagleDynamicTree(feature_head("mtp", model()), width=1, total=3), Retrieval(store, candidates=2)):
        got = run(drafter, start, sampling, draft_length=5)
        assert_same(got.tokens, want, model(), start, sampling)
        assert got.statistics[0].drafted
