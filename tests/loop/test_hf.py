"""`specdec_loop.hf`: `model.generate` as ever, only with drafts; and an exact `_speculative_sampling`."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from callbacks import Banned, Counting, Heard, StopsAt
from check import assert_distribution
from exact_chains import processed
from head_models import feature_head
from model_families import FAMILIES, build
from models import VOCAB, WINDOW, model
from texts import assert_same, prompts
from torch import Tensor
from transformers.generation import (
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    utils,
)

from specdec_kernels import Sampling
from specdec_loop import Lookahead, PromptLookup, generate, hf
from specdec_loop.drafters import EagleDynamicTree, NoDrafter
from specdec_loop.hf.processors import likely, split

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 20
STARTS = prompts(4)
WIDTH = max(map(len, STARTS))
IDS = torch.tensor([[0] * (WIDTH - len(s)) + s for s in STARTS])
MASK = torch.tensor([[0] * (WIDTH - len(s)) + [1] * len(s) for s in STARTS])
PADDED: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}


def plain(ids: Tensor = IDS, **how: Any) -> Any:
    return model().generate(ids, **{**PADDED, **how})


def fast(ids: Tensor = IDS, **how: Any) -> Any:
    own = {} if "drafter" in how else {"draft_model": model(seed=1)}
    return model().generate(ids, **{"custom_generate": hf.generate, **own, **PADDED, **how})


def assert_equal(got: Tensor, want: Tensor) -> None:
    """The same ids, but where rounding alone decides."""
    rows = [[ids[b, WIDTH:].tolist() for b in range(len(ids))] for ids in (got, want)]
    assert got.shape == want.shape and torch.equal(got[:, :WIDTH], want[:, :WIDTH])
    assert_same(rows[0], rows[1], model(), STARTS, Sampling.full(len(STARTS), temperature=0.0))


# --- texts


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("drafter", [None, PromptLookup(), Lookahead(3, 4, 2)], ids=["model", "lookup", "lookahead"])
def test_a_greedy_text_is_that_of_plain_generate(drafter: Any, cache: str | None) -> None:
    own = {} if drafter is None else {"drafter": drafter}
    assert_equal(fast(**own, cache_implementation=cache), plain(cache_implementation=cache))


def test_without_padding_without_a_mask_and_without_a_drafter() -> None:
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    how = {"max_length": 17, "max_new_tokens": None, "attention_mask": None}
    got = model().generate(ids, **{**PADDED, **how}, custom_generate=hf.generate)
    assert torch.equal(got, plain(ids, **how)) and got.shape[1] == 17


def test_a_batch_whose_rows_all_have_padding() -> None:
    ids, mask = torch.tensor([[0] * 30 + [5, 6, 7], [0] * 31 + [5, 6]]), torch.tensor([[0] * 30 + [1] * 3] * 2)
    mask[1, 30] = 0
    for rows in (slice(0, 1), slice(0, 2)):
        for caches in ({}, {"cache_implementation": "static"}):
            how = {"attention_mask": mask[rows], "draft_length": 8, **caches}
            assert torch.equal(fast(ids[rows], **how), plain(ids[rows], attention_mask=mask[rows], **caches))


def test_trees_may_have_fewer_nodes_than_a_draft_may_be_long() -> None:
    drafter = EagleDynamicTree(feature_head("mtp", model()), width=1, total=3)
    assert_equal(fast(drafter=drafter, draft_length=5), plain())


def test_end_tokens_end_a_text_and_are_followed_by_padding() -> None:
    free = plain()
    eos = [int(free[0, WIDTH + 4]), int(free[2, WIDTH + 9])]
    want = plain(eos_token_id=eos)
    assert (want[:, -1] == 0).any()
    for draft in (model(seed=1), model()):
        assert_equal(fast(eos_token_id=eos, draft_model=draft), want)


@pytest.mark.parametrize("make", [transformers.DynamicCache, transformers.StaticCache])
def test_a_cache_is_read_and_filled_as_plain_generate_does(make: Any) -> None:
    caches = [make(**{"config": model().config, **({"max_cache_len": 64} if make is transformers.StaticCache else {})})
              for _ in range(3)]  # fmt: skip
    first = [way(past_key_values=cache) for way, cache in zip((plain, fast, fast), caches, strict=True)]
    assert_equal(first[1], first[0])
    assert int(caches[1].get_seq_length()) == int(caches[0].get_seq_length()) == WIDTH + TOKENS - 1
    longer = torch.cat([first[0], torch.tensor([[4, 9]]).expand(4, -1)], 1)
    mask = torch.cat([MASK, torch.ones(4, TOKENS + 2, dtype=torch.int64)], 1)
    second = [
        way(longer, attention_mask=mask, past_key_values=cache)
        for way, cache in zip((plain, fast, plain), caches, strict=True)
    ]  # the third cache was filled by the one and is read by the other
    assert torch.equal(second[1], second[0]) and torch.equal(second[2], second[0])


WINDOWED = ["mistral, all layers slide", "gemma2, softcap", "gemma3", "cohere2", "gpt_oss, sinks"]


@pytest.mark.parametrize("family", WINDOWED)
def test_texts_longer_than_a_sliding_window_are_those_of_plain_generate(family: str) -> None:
    network = model(family, "eager")
    assert TOKENS > 2 * WINDOW
    caches = [transformers.DynamicCache(config=network.config) for _ in range(2)]
    want = network.generate(IDS, **PADDED, past_key_values=caches[0])
    for draft in (model(family, "eager", seed=1), network):
        fresh = network.generate(IDS, **PADDED, custom_generate=hf.generate, draft_model=draft)
        assert torch.equal(fresh, want)
    own = {"custom_generate": hf.generate, "draft_model": network, "past_key_values": caches[1]}
    assert torch.equal(network.generate(IDS, **PADDED, **own), want)
    assert int(caches[1].get_seq_length()) == WIDTH + TOKENS - 1
    mask = torch.cat([MASK, torch.ones(4, TOKENS, dtype=torch.int64)], 1)
    further = [network.generate(want, **{**PADDED, "attention_mask": mask}, past_key_values=cache) for cache in caches]
    assert torch.equal(further[1], further[0])  # the cache that we filled holds what plain generate needs of it


def test_layers_that_share_the_rows_of_others_are_left_out_of_a_cache() -> None:
    network = build(*FAMILIES["Gemma 3n"])
    ids, how = torch.tensor([[5, 6]]), {"max_new_tokens": 2, "do_sample": False}  # within the window
    own = {"custom_generate": hf.generate, "draft_model": network}
    caches = [transformers.DynamicCache(config=network.config) for _ in range(2)]
    first = [network.generate(ids, **how, **more, past_key_values=c) for c, more in zip(caches, ({}, own), strict=True)]
    assert torch.equal(first[1], first[0])
    longer = torch.cat([first[0], ids], 1)
    second = [network.generate(longer, **how, **more, past_key_values=c)
              for c, more in zip(caches, (own, {}), strict=True)]  # fmt: skip
    assert torch.equal(second[1], second[0])


@pytest.mark.parametrize("family", ["mistral, all layers slide", "gemma3"])
def test_a_static_cache_needs_room_for_the_text_or_for_the_window(family: str) -> None:
    network, draft = model(family, "eager"), model(family, "eager", seed=1)
    own = {"custom_generate": hf.generate, "draft_model": draft}
    cache = transformers.StaticCache(network.config, max_cache_len=WIDTH + TOKENS)
    want = network.generate(IDS, **PADDED)
    assert torch.equal(network.generate(IDS, **PADDED, **own, past_key_values=cache), want)
    small = transformers.StaticCache(network.config, max_cache_len=WINDOW - 1)
    need = WINDOW if "all" in family else WIDTH + TOKENS - 1
    with pytest.raises(ValueError, match=f"of room for {need} tokens, got {WINDOW - 1}"):
        network.generate(IDS, **PADDED, **own, past_key_values=small)


def test_a_cache_of_texts_that_ended_early_holds_what_all_have() -> None:
    eos = int(plain()[1, WIDTH + 3])
    cache = transformers.DynamicCache(config=model().config)
    text = fast(eos_token_id=eos, past_key_values=cache)
    ends = [row.index(eos) + 1 if eos in row else TOKENS for row in text[:, WIDTH:].tolist()]
    assert int(cache.get_seq_length()) == WIDTH + min(ends) - 1 < text.shape[1] - 1
    mask = torch.cat([MASK, torch.ones(4, text.shape[1] - WIDTH, dtype=torch.int64)], 1)
    want = plain(text, attention_mask=mask)
    assert torch.equal(plain(text, attention_mask=mask, past_key_values=cache), want)


class CountsScores(transformers.StoppingCriteria):
    """Ends nothing; writes down how many scores it is given."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(len(scores))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_scores_and_logits_are_those_of_plain_generate() -> None:
    how = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    want = plain(**how)
    bare, criteria = {**how, "repetition_penalty": 1.0}, (CountsScores(), CountsScores())
    pairs = zip(
        fast(**bare, stopping_criteria=[criteria[0]]).scores, plain(**bare, stopping_criteria=[criteria[1]]).scores,
        strict=True,
    )  # fmt: skip
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in pairs)  # without processors they are the logits
    assert criteria[0].seen == criteria[1].seen == [*range(1, TOKENS + 1)]
    for drafter in (None, NoDrafter()):
        got = fast(**how, **({} if drafter is None else {"drafter": drafter}))
        assert_equal(got.sequences, want.sequences)
        for name in ("scores", "logits"):
            pairs = zip(getattr(got, name), getattr(want, name), strict=True)
            assert all(torch.allclose(x, y, atol=1e-4) for x, y in pairs), name
        assert int(got.past_key_values.get_seq_length()) == WIDTH + TOKENS - 1
    tree = fast(**{**how, "repetition_penalty": 1.0}, drafter=Lookahead(3, 4, 2))
    assert all(
        torch.equal(row.argmax(1), ids) for row, ids in zip(tree.logits, tree.sequences[:, WIDTH:].T, strict=True)
    )


# --- processors


@pytest.mark.parametrize(
    "how",
    [
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"sequence_bias": [[[9], -4.0], [[58, 5], 3.0]], "bad_words_ids": [[36], [9, 58]]},
        {"min_new_tokens": 9, "eos_token_id": 7, "forced_eos_token_id": 7, "suppress_tokens": [8]},
        {"logits_processor": [Banned()], "exponential_decay_length_penalty": (3, 1.2), "eos_token_id": 9},
        {"prefix_allowed_tokens_fn": lambda b, ids: [*range(1 + b + len(ids) % 3, VOCAB, 2)]},
    ],
    ids=["repetition", "bias", "lengths", "own", "allowed"],
)
def test_processors_see_each_position_with_its_own_prefix(how: dict[str, Any]) -> None:
    want = plain(**how)
    assert not torch.equal(want[:, : plain().shape[1]], plain()[:, : want.shape[1]])
    for draft in (model(seed=1), model()):
        got = fast(**how, draft_model=draft)
        assert torch.equal(got, want)


@pytest.mark.parametrize("length", [3, 4])
@pytest.mark.parametrize("kind", ["bad_words_ids", "sequence_bias"])
def test_a_bad_word_may_begin_in_the_padding(kind: str, length: int) -> None:
    ids = torch.tensor([[0, 0, 0, 5], [1, 2, 3, 4]])
    how = {**PADDED, "attention_mask": (ids > 0).long(), "max_new_tokens": 6}
    first = int(model().generate(ids, **how)[0, 4])
    word = [0] * (length - 2) + [5, first]
    how[kind] = [word] if kind == "bad_words_ids" else [[word, -float("inf")]]
    want = model().generate(ids, **how)
    assert int(want[0, 4]) != first
    assert torch.equal(model().generate(ids, **how, custom_generate=hf.generate, draft_model=model(seed=1)), want)


def test_a_processor_that_keeps_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="Counting must be a function of prefix and logits"):
        fast(logits_processor=[Counting()])
    with pytest.raises(ValueError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor must be"):
        fast(guidance_scale=1.5)


def test_a_processor_and_a_tree_are_refused_together() -> None:
    with pytest.raises(ValueError, match="need a drafter of chains"):
        fast(no_repeat_ngram_size=3, drafter=Lookahead(3, 4, 2))


WARPERS = {
    "temperature": lambda: TemperatureLogitsWarper(0.7),
    "top_k": lambda: TopKLogitsWarper(6),
    "top_p": lambda: TopPLogitsWarper(0.75),
    "min_p": lambda: MinPLogitsWarper(0.12),
    "normalise": LogitNormalization,
}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_calls_and_distribution_together_are_all_processors_in_any_order(count: int) -> None:
    logits, nothing = 3 * torch.randn(8, 13), torch.zeros(8, 1, dtype=torch.int64)
    for names in itertools.permutations(WARPERS, count):
        listed = [WARPERS[name]() for name in names]
        calls, sampling = split(listed, batch=1, device=torch.device("cpu"))
        want = LogitsProcessorList(listed)(nothing, logits.clone()).softmax(-1)
        rows = LogitsProcessorList(calls)(nothing, logits.clone())
        got = processed(rows, **{n: x.tolist()[0] for n, x in sampling._asdict().items() if x is not None})
        assert torch.allclose(got.float(), want, atol=1e-5), names
    assert isinstance(likely(listed, batch=1, device=torch.device("cpu")), Sampling)


@pytest.mark.parametrize("make", [TopPLogitsWarper, MinPLogitsWarper])
def test_a_filter_that_keeps_two_tokens_is_called(make: Any) -> None:
    """`Sampling` keeps one at least: the kernels do not know this filter."""
    sharp = torch.tensor([[9.0, 1.0, 0.5, 0.0]])
    warper = make(0.9, min_tokens_to_keep=2)
    assert warper(torch.zeros(1, 1), sharp.clone()).isfinite().sum() == 2
    calls, sampling = split([TemperatureLogitsWarper(0.7), warper], batch=1, device=torch.device("cpu"))
    assert [type(call) for call in calls] == [TemperatureLogitsWarper, make]
    assert all(part is None for part in sampling)


def test_what_transformers_makes_of_a_config_needs_no_call() -> None:
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9}
    config = transformers.GenerationConfig(**settings)
    calls, sampling = split(model()._get_logits_processor(config), batch=2, device=torch.device("cpu"))
    assert not calls
    assert {n: pytest.approx(float(x[1])) for n, x in sampling._asdict().items() if x is not None} == {
        "temperature": 0.7, "top_k": 9, "top_p": 0.9,
    }  # fmt: skip
    config.min_p = 0.1  # behind the nucleus, which is then measured in more than `Sampling` would measure it in
    calls, sampling = split(model()._get_logits_processor(config), batch=2, device=torch.device("cpu"))
    assert [type(c).__name__ for c in calls] == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]


# --- sampling


def test_a_seeded_text_is_that_of_the_loop_whatever_is_drafted() -> None:
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95}
    sampling = Sampling.full(4, temperature=0.8, top_k=20, top_p=0.95)
    want = generate(model(), None, STARTS, sampling=sampling, seed=5, max_new_tokens=TOKENS, stop=()).tokens
    for drafter in (None, NoDrafter(), PromptLookup()):
        got = fast(**sampled, seed=5, **({} if drafter is None else {"drafter": drafter}))
        assert_same(got[:, WIDTH:].tolist(), want, model(), STARTS, sampling, 5)


def test_processors_and_sampling_together_do_not_depend_on_the_drafts() -> None:
    sampled = {"do_sample": True, "temperature": 0.8, "min_p": 0.02, "top_p": 0.9, "logits_processor": [Banned()]}
    want = fast(**sampled, seed=3, drafter=NoDrafter())
    assert torch.equal(fast(**sampled, seed=3, drafter=PromptLookup()), want)
    assert torch.equal(fast(**sampled, seed=3, draft_model=model()), want)


def test_torch_seeds_a_text_that_has_no_seed() -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(fast(do_sample=True, num_return_sequences=2))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0][0], texts[0][1])


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_other_rules_follow_the_distribution_of_the_first_tokens(rule: str) -> None:
    network, batch = model(), 2000
    prompt, temperature = torch.tensor([[5, 6, 7]]), 0.25
    ids = network.generate(
        prompt.expand(batch, -1), custom_generate=hf.generate, draft_model=model(seed=1), rule=rule, max_new_tokens=2,
        do_sample=True, temperature=temperature, top_k=3, pad_token_id=0,
    )  # fmt: skip
    counts = torch.zeros(VOCAB, VOCAB)
    counts.index_put_((ids[:, 3], ids[:, 4]), torch.ones(batch), accumulate=True)
    first = processed(network(prompt).logits[0, -1:].double(), temperature=temperature, top_k=3)[0]
    behind = torch.cat([prompt.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)
    then = processed(network(behind).logits[:, -1].double(), temperature=temperature, top_k=3)
    assert_distribution(counts.flatten(), (first[:, None] * then).flatten(), rule)


# --- criteria, streamers


@pytest.mark.parametrize("eos", [None, 7], ids=["no end token", "end token"])
def test_criteria_and_streamers_are_called_as_by_plain_generate(eos: int | None) -> None:
    criteria, heard = (StopsAt(), StopsAt()), (Heard(), Heard())
    want = plain(eos_token_id=eos, stopping_criteria=[criteria[0]], streamer=heard[0])
    method = functools.partial(hf.generate, streamer=heard[1])
    got = fast(eos_token_id=eos, stopping_criteria=[criteria[1]], custom_generate=method)
    assert torch.equal(got, want) and got.tolist() != plain().tolist()
    assert all(torch.equal(x, y) for x, y in zip(criteria[0].seen, criteria[1].seen, strict=True))
    assert heard[0].columns == heard[1].columns


class EndsRows(transformers.StoppingCriteria):
    """Ends request b when it has so many new tokens."""

    def __init__(self, *counts: int) -> None:
        self.counts = torch.tensor(counts)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] - WIDTH >= self.counts


@pytest.mark.parametrize("eos", [None, 7], ids=["no end token", "end token"])
@pytest.mark.parametrize("draft_length", [1, 4, 6])
def test_a_criterion_that_ends_rows_one_by_one_cuts_what_ran_ahead(eos: int | None, draft_length: int) -> None:
    """Every draft is right, so each step runs past the column at which a request ends."""
    for counts in ((3, 5, 6, 11), (9, 1, 2, 4)):
        heard = Heard(), Heard()
        want = plain(eos_token_id=eos, stopping_criteria=[EndsRows(*counts)], streamer=heard[0])
        method = functools.partial(hf.generate, streamer=heard[1])
        own = {"draft_model": model(), "draft_length": draft_length, "custom_generate": method}
        got = fast(eos_token_id=eos, stopping_criteria=[EndsRows(*counts)], **own)
        assert torch.equal(got, want) and want.shape[1] == WIDTH + max(counts)
        assert heard[0].columns == heard[1].columns
        if eos is not None:  # where an end token is known, a finished row is padding
            assert [(row == 0).sum() for row in want[:, WIDTH:]] == [max(counts) - count for count in counts]


# --- what cannot be


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_beams": 2}, "num_beams must be 1"),
        ({"inputs_embeds": torch.zeros(4, WIDTH, 32)}, "inputs must be tokens"),
        ({"mm_encoder_outputs": {"image": torch.zeros(1, 32)}}, "inputs must be tokens"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states must be False"),
        ({"position_ids": torch.zeros(4, WIDTH, dtype=torch.int64)}, "position_ids must be left out"),
        ({"position_ids": torch.zeros(3, 4, WIDTH, dtype=torch.int64)}, "position_ids must be left out"),
        ({"drafter": PromptLookup(), "draft_model": model()}, "drafter must be left out"),
        (
            {"past_key_values": transformers.StaticCache(model().config, max_cache_len=9)},
            "of room for 33 tokens, got 9",
        ),
    ],
)
def test_what_cannot_be_done_exactly_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fast(**how)


def test_logits_without_a_token_are_an_error() -> None:
    def nothing(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -float("inf") if ids.shape[1] > WIDTH + 3 else 1.0)

    with pytest.raises(RuntimeError, match="the logits of request 0 hold NaN, or no token"):
        fast(logits_processor=[nothing], do_sample=True)


# --- the folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The published layout, read by a transformers that keeps its copy here, beside a package that pip knows of."""
    known = tmp_path / "site/specdec_kernels-0.1.0.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: specdec_kernels\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(known.parent)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return str(ROOT / "examples/custom_generate")


def test_the_published_folder_decodes(folder: str) -> None:
    heard, want = Heard(), plain()
    own = {"custom_generate": folder, "trust_remote_code": True}
    assert torch.equal(model().generate(IDS, **PADDED, **own, draft_model=model(seed=1), streamer=heard), want)
    assert heard.columns == [IDS.tolist(), *want[:, WIDTH:].T.tolist(), []]
    assert torch.equal(model().generate(IDS, **PADDED, **own, assistant_model=model(seed=1)), want)
    assert "custom_generate" in (Path(folder) / "README.md").read_text().split("---")[1]


# --- transformers' own loop


def test_assisted_generation_verifies_by_ours_inside_the_context_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    counted = lambda *a, **k: calls.append(a) or hf.speculative_sampling(*a, **k)  # noqa: E731
    monkeypatch.setattr(hf.verification, "speculative_sampling", counted)
    ids, theirs = torch.tensor([[5, 6, 7]]), utils._speculative_sampling
    how = {"max_new_tokens": 12, "do_sample": True, "top_k": 1, "pad_token_id": 0, "assistant_model": model(seed=1)}
    with hf.patched():
        got = model().generate(ids, **how)
    assert calls and utils._speculative_sampling is theirs
    assert torch.equal(got, model().generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0))


# --- speed


@pytest.mark.slow
def test_a_batch_is_faster_than_assisted_generation_one_by_one() -> None:
    from examples.transformers_batch import compare

    texts, seconds = compare(tokens=24)
    plainly, assisted, ours = seconds
    print(*(f"{name}: {taken:.2f} s" for name, taken in seconds.items()), sep="\n")
    assert torch.equal(texts[ours], texts[plainly])
    assert seconds[ours] < seconds[assisted]
