"""Recurrent layers of a TreeCache: the state after what was accepted alone, whatever a step tried."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import model_families
import pytest
import torch
from caches import counts
from head_models import TinyAssets
from models import RECURRENT, model
from ragged import PROMPTS, Requests, assert_close, new_cache, random_tokens
from texts import assert_same, prompts
from transformers import DynamicCache

from specdec_kernels import Sampling
from specdec_loop import Datastore, PrefixCache, PromptLookup, generate, generation, hf
from specdec_loop.methods import METHODS
from specdec_loop.serve.forward import check
from specdec_loop.tree_cache import check_model, states
from specdec_loop.tree_cache.recurrence import lead, modeling_file

# Of float32 logits of order 1. transformers' own forms of a recurrence, token by token and in chunks, differ by up to
# 1.4e-4 here; a state that has read one token too many moves them by 1e-2 or more.
CLOSE = 5e-4

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("calls", [1, 4])  # a tree in one forward, and one that grows
@pytest.mark.parametrize("family", RECURRENT)
def test_trees_and_chains_leave_the_states_of_sequential_decoding(family: str, calls: int) -> None:
    requests = Requests(model(family), PROMPTS, random.Random(family), close=CLOSE)
    for step in range(6):
        requests.tree_step(1 + 3 * step % 11, calls=calls)
        requests.chain_step(1 + step % 4)


def test_a_state_that_has_read_too_much_is_seen() -> None:
    """The twin: where a commit advances over a rejected draft too, the logits are others."""
    network = model("qwen3_next")
    requests = Requests(network, PROMPTS, random.Random(0), close=CLOSE)
    honest = requests.cache._states.commit

    def careless(accepted: torch.Tensor, path: torch.Tensor | None, *, is_whole: bool) -> None:
        honest(torch.where(accepted < 3, accepted + 1, 3), path, is_whole=is_whole)

    requests.cache._states.commit = careless

    def steps() -> None:
        for _ in range(4):
            requests.chain_step(4)

    with pytest.raises(AssertionError, match="logits differ by"):
        steps()


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "bamba"])
def test_a_chain_that_is_kept_whole_is_not_replayed(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward has made the states after it; one accepted token fewer, and they are made from the inputs."""
    network, calls = model(family), []
    replay = states.advance_state
    monkeypatch.setattr(states, "advance_state", lambda *args, **kw: (calls.append(1), replay(*args, **kw))[1])
    ids = torch.tensor([random_tokens(rows + 1, random.Random(3)) for _ in range(3)])
    whole, replayed = new_cache(network, 3, 16), new_cache(network, 3, 16)
    network(ids[:, :rows], **whole.chain_inputs(rows))
    whole.commit(rows - 1)
    assert not calls
    network(ids, **replayed.chain_inputs(rows + 1))
    replayed.commit(torch.full((3,), rows - 1, dtype=torch.int32))
    assert calls
    assert_close(whole._states.states, replayed._states.states, "states", CLOSE)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "lfm2", "bamba"])
def test_a_tree_that_grows_level_by_level_is_the_whole_one(family: str) -> None:
    """Siblings, children, children's children, behind texts of several lengths."""
    network, draw, lengths, width = model(family), random.Random(1), [9, 4, 1], 4
    text = torch.tensor([random_tokens(9, draw) for _ in lengths])
    levels = [torch.tensor([random_tokens(width, draw) for _ in lengths]) for _ in range(3)]
    rows = [torch.tensor([[draw.randrange(width) for _ in range(width)] for _ in lengths]) for _ in range(2)]
    caches = [new_cache(network, 3, 9 + 3 * width) for _ in range(2)]
    for cache in caches:
        network(text, **cache.chain_inputs(9))
        cache.commit(counts(lengths) - 1)
    root, first = torch.full((3, 1), -1), torch.zeros(3, width, dtype=torch.int64)
    parents = torch.cat([root, first, rows[0] + 1, rows[1] + 1 + width], 1)
    want = network(torch.cat(levels, 1), **caches[0].tree_inputs(parents, is_root_committed=True)).logits
    inputs = caches[1].sibling_inputs(width)
    for depth, ids in enumerate(levels):
        inputs = caches[1].child_inputs(inputs, rows[depth - 1]) if depth else inputs
        got = network(ids, **inputs).logits
        assert_close(got, want[:, depth * width : (depth + 1) * width], f"depth {depth + 1}", CLOSE)


def drafter_of(name: str, family: str) -> Any:
    assets = TinyAssets(
        model(family),
        heads=Path("nowhere").joinpath,
        load_draft=lambda: model(family, seed=1),
        load_store=lambda: Datastore.build(prompts()),
    )
    return METHODS[name].make(assets)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "plain"])
def test_every_method_keeps_the_greedy_text(name: str, count: int) -> None:
    """The draft model has recurrent layers as well."""
    network, sampling = model("qwen3_next"), Sampling.full(count, temperature=0.0)
    arguments: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 16, "stop": ()}
    plain = generate(network, None, prompts(count), **arguments).tokens
    got = generate(network, drafter_of(name, "qwen3_next"), prompts(count), rule=METHODS[name].rule, **arguments)
    assert_same(got.tokens, plain, network, prompts(count), sampling)


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("name", ["prompt-lookup", "draft-model", "rest"])
def test_a_seeded_text_is_that_of_plain_decoding(name: str, family: str) -> None:
    network, sampling = model(family), Sampling.full(4, temperature=0.9)
    drafter = drafter_of(name, family)
    arguments: dict[str, Any] = {"sampling": sampling, "seed": 3, "max_new_tokens": 16, "stop": ()}
    plain = generate(network, None, prompts(4), **arguments).tokens
    got = generate(network, drafter, prompts(4), rule="match", **arguments)
    assert_same(got.tokens, plain, network, prompts(4), sampling, seed=3)


def test_what_is_not_committed_can_be_taken_back() -> None:
    network, ids = model("qwen3_next"), torch.tensor([random_tokens(12, random.Random(b)) for b in range(2)])
    whole, cache = network(ids).logits, new_cache(network, 2)
    network(ids[:, :4], past_key_values=cache)
    cache.commit(3)
    network(torch.cat([ids[:, 4:7], ids[:, :3]], 1), **cache.chain_inputs(6))
    cache.crop(-3)
    got = network(ids[:, 7:], **cache.chain_inputs(5)).logits
    assert_close(got, whole[:, 7:], "behind what was taken back", CLOSE)
    with pytest.raises(ValueError, match="a recurrent state cannot be taken back, got 9"):
        cache.crop(-9)
    cache.commit(7)
    with pytest.raises(ValueError, match="lengths must be 0 or no fewer than there are"):
        cache.truncate(torch.tensor([12, 5]))
    assert cache.lengths.tolist() == [12, 12]
    cache.truncate(torch.tensor([12, 0]))
    again = network(ids[:, :5], **cache.chain_inputs(5)).logits
    assert_close(again[1], whole[1, :5], "request 1, begun again", CLOSE)


def test_beams_take_their_states_along_and_a_reset_forgets_them() -> None:
    network, ids = model("bamba"), torch.tensor([random_tokens(8, random.Random(b)) for b in range(2)])
    whole, cache = network(ids).logits, new_cache(network, 2)
    network(ids[:, :5], past_key_values=cache)
    cache.commit(4)
    cache.reorder_cache(torch.tensor([1, 0]))
    got = network(ids.flip(0)[:, 5:], **cache.chain_inputs(3)).logits
    assert_close(got, whole.flip(0)[:, 5:], "exchanged", CLOSE)
    cache.reset()
    assert_close(network(ids, **cache.chain_inputs(8)).logits, whole, "after a reset", CLOSE)


def test_a_bad_path_leaves_that_request_alone() -> None:
    network = model("qwen3_next")
    cache = new_cache(network, 2)
    network(torch.tensor([[5, 6], [7, 8]]), past_key_values=cache)
    cache.commit(1)
    states = cache._states
    before = states.states.clone(), states.windows.clone()
    network(torch.tensor([[1, 2, 3]] * 2), **cache.tree_inputs(torch.tensor([[-1, 0, 1]] * 2)))
    status = cache.commit(counts([2, 2]), torch.tensor([[2, 1], [1, 2]]))
    assert status.tolist() == [32, 0] and cache.lengths.tolist() == [2, 5]
    for old, new in zip(before, (states.states, states.windows), strict=True):
        assert torch.equal(old[:, 0], new[:, 0]) and not torch.equal(old[:, 1], new[:, 1])


@pytest.mark.parametrize("says_more", [True, False])
def test_turns_of_a_conversation_reuse_states_that_have_read_nothing_else(says_more: bool) -> None:
    network, sampling = model("qwen3_next"), Sampling.full(2, temperature=0.0)
    arguments: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 12, "stop": ()}
    past = PrefixCache(capacity=80)
    first = generate(network, PromptLookup(), prompts(2), past=past, **arguments).tokens
    turns = [[*p, *new, 5, 6] if says_more else [*p, 5, 6] for p, new in zip(prompts(2), first, strict=True)]
    cache, ran = past.cache, []
    plain_inputs = cache.chain_inputs
    cache.chain_inputs = lambda tokens: ran.append(tokens) or plain_inputs(tokens)
    second = generate(network, PromptLookup(), turns, past=past, **arguments).tokens
    assert_same(second, generate(network, None, turns, **arguments).tokens, network, turns, sampling)
    assert ran[0] == (3 if says_more else max(map(len, turns)))


def test_transformers_own_caches_go_on_as_before() -> None:
    network, ids = model("qwen3_next"), torch.tensor([random_tokens(9, random.Random(1))])
    module = modeling_file(network.config)
    lead(module)
    led = module.torch_chunk_gated_delta_rule
    lead(module)
    assert module.torch_chunk_gated_delta_rule is led  # once
    cache = DynamicCache(config=network.config)
    got = torch.cat([network(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 5), (5, 9))], 1)
    assert_close(got, network(ids).logits, "a DynamicCache", CLOSE)


def test_caches_and_servers_without_states_are_refused() -> None:
    network, ids = model("qwen3_next"), torch.tensor([[5, 6, 7]])
    cache = DynamicCache(config=network.config)
    with pytest.raises(ValueError, match="the states of recurrent layers do not move between caches"):
        network.generate(ids, past_key_values=cache, custom_generate=hf.generate, max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match="its layers are recurrent"):
        check(network)


@pytest.mark.parametrize("family", ["Nemotron H", "Zamba 2"])
def test_bounded_time_steps_are_refused(family: str) -> None:
    network = model_families.build(*model_families.FAMILIES[family])
    with pytest.raises(ValueError, match="bounds its time steps in forwards of several tokens"):
        check_model(network.config, network)


def test_a_model_none_of_whose_layers_attends_is_refused() -> None:
    """But for those whose forwards know neither rows nor positions."""
    kind, special = model_families.FAMILIES["LFM 2"]
    config = model_families.build(kind, {**special, "layer_types": ["conv", "conv"]}).config
    with pytest.raises(ValueError, match="none of its layers attends"):
        check_model(config)


def test_a_scan_of_nobody_s_cache_goes_on_as_before() -> None:
    """A forward that fails between a layer's convolution and its scan leaves its mark; the next scan is not its own."""
    network, ids = model("mamba"), torch.tensor([random_tokens(9, random.Random(1))])
    want, cache = network(ids).logits, new_cache(network, 1)
    mixer = network.backbone.layers[0].mixer
    mixer.x_proj.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        network(ids, **cache.chain_inputs(9))
    del mixer.x_proj.forward
    assert torch.equal(network(ids).logits, want)
    cache.crop(-cache.get_seq_length())
    assert_close(network(ids, **cache.chain_inputs(9)).logits, want, "the cache, begun again", CLOSE)


def test_a_bad_path_is_told_where_no_layer_has_rows() -> None:
    network = model("mamba2")
    cache = new_cache(network, 2)
    network(torch.tensor([[5, 6], [7, 8]]), **cache.chain_inputs(2))
    cache.commit(1)
    network(torch.tensor([[1, 2, 3]] * 2), **cache.tree_inputs(torch.tensor([[-1, 0, 1]] * 2)))
    states = cache._states
    before = states.states.clone(), states.windows.clone()
    status = cache.commit(counts([2, 2]), torch.tensor([[2, 1], [1, 2]]))
    assert status.tolist() == [32, 0] and cache.lengths.tolist() == [2, 5]
    for old, new in zip(before, (states.states, states.windows), strict=True):
        assert torch.equal(old[:, 0], new[:, 0]) and not torch.equal(old[:, 1], new[:, 1])


@pytest.mark.parametrize("name", ["medusa", "eagle2", "mtp-tree"])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a_tree_that_comes_again_is_one_of_a_model_without_rows(family: str, name: str) -> None:
    network, sampling = model(family), Sampling.full(1, temperature=0.8)
    arguments: dict[str, Any] = {"sampling": sampling, "seed": 5, "max_new_tokens": 12, "stop": ()}
    plain = generate(network, None, prompts(1), **arguments).tokens
    got = generate(network, drafter_of(name, family), prompts(1), rule=METHODS[name].rule, **arguments)
    assert_same(got.tokens, plain, network, prompts(1), sampling, seed=5)


@pytest.mark.parametrize("family", RECURRENT)
def test_a_step_of_drafts_keeps_one_state_and_its_inputs(family: str) -> None:
    network, cache = model(family), new_cache(model(family), 2, 64)
    network(torch.tensor([random_tokens(5, random.Random(1))] * 2), **cache.chain_inputs(5))
    cache.commit(torch.tensor([4, 3], dtype=torch.int32))
    nodes = torch.tensor([random_tokens(5, random.Random(2))] * 2)
    steps = (lambda: cache.chain_inputs(5), lambda: cache.tree_inputs(torch.tensor([[-1, 0, 0, 1, 2]] * 2)))
    for inputs in steps:
        network(nodes, **inputs())
        of_layers = [layer.running for layer in cache._states.layers]
        assert of_layers == [None] * len(of_layers)
        cache.commit(torch.tensor([0, -1], dtype=torch.int32), torch.full((2, 4), -1))


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_long_prompts_are_read_in_pieces(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer keeps the inputs of one piece; prompts end in different pieces."""
    network, sampling, kept = model(family), Sampling.full(4, temperature=0.9), []
    arguments: dict[str, Any] = {"sampling": sampling, "seed": 3, "max_new_tokens": 8, "stop": ()}
    whole = generate(network, drafter_of("mtp", family), prompts(4), **arguments).tokens
    monkeypatch.setattr(generation, "PIECE", 3)
    replay = states.advance_state
    monkeypatch.setattr(
        states, "advance_state", lambda s, k, *a, **kw: (kept.append(k.shape[2]), replay(s, k, *a, **kw))[1]
    )
    got = generate(network, drafter_of("mtp", family), prompts(4), **arguments).tokens
    assert_same(got, whole, network, prompts(4), sampling, seed=3)
    assert max(len(ids) for ids in prompts(4)) > 6 >= max(kept)
