"""TreeCache: the logits of sequential decoding, whatever trees came between; memory that never moves; clear errors."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from caches import counts, padded
from models import CASES, VOCAB, model
from ragged import PROMPTS, Requests, assert_close, new_cache, random_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from specdec_loop import TreeCache
from specdec_loop.tree_cache.support import cache_argument, check_model

# --- the logits of sequential decoding


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_trees_and_chains_leave_the_cache_of_sequential_decoding(family: str, attention: str) -> None:
    requests = Requests(model(family, attention), PROMPTS, random.Random(family))
    for step in range(8):
        requests.tree_step(1 + 3 * step % 11)
        requests.chain_step(1 + step % 4)


@pytest.mark.parametrize("mover", ["reference", "cpu"])  # of the rows; the others are held to the same bytes
@pytest.mark.parametrize("seed", range(4))
def test_fifty_steps_of_random_trees(mover: str, seed: int) -> None:
    requests = Requests(model("llama"), PROMPTS, random.Random(seed), capacity=300)
    for _ in range(50):
        requests.tree_step(8, mover)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral, all layers slide"])
def test_a_tree_may_grow_over_several_forwards(family: str) -> None:
    requests = Requests(model(family), PROMPTS, random.Random(3))
    for _ in range(6):
        requests.tree_step(9, calls=4)


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gemma3", "sdpa")])
def test_even_requests_may_say_so(family: str, attention: str) -> None:
    """An int commits the same as a tensor, and masks of even requests are those of ragged ones."""
    network, ids = model(family, attention), torch.tensor([random_tokens(100, random.Random(b)) for b in range(3)])
    whole, caches = network(ids).logits, [new_cache(network, 3) for _ in range(2)]
    caches[1]._lengths.is_on_host = False  # as on a GPU: lengths are not looked at
    end = 0
    for count, kept in ((7, 7), (1, 1), (4, 2), (3, 0), (5, 5), (1, 0), (70, 66), (2, 2)):
        for cache, is_int in zip(caches, (True, False), strict=True):
            logits = network(ids[:, end : end + count], **cache.chain_inputs(count)).logits
            assert_close(logits, whole[:, end : end + count], f"{count} tokens behind {end}")
            status = cache.commit(kept - 1 if is_int else torch.full((3,), kept - 1).int())
            assert status.tolist() == [0, 0, 0] and cache.lengths.tolist() == [end + kept] * 3
        end += kept
    for even, ragged in zip(caches[0].layers, caches[1].layers, strict=True):
        for name in ("keys", "values"):
            assert_close(getattr(even, name)[:, :, :end], getattr(ragged, name)[:, :, :end], name)


@pytest.mark.parametrize("lengths", [[9], [9, 9, 9], [9, 4, 1]], ids=["one", "even", "ragged"])
@pytest.mark.parametrize("width", [3, 70])
@pytest.mark.parametrize("on_host", [True, False])  # False, as on a GPU: lengths are not looked at
def test_a_tree_that_grows_level_by_level_is_the_whole_one(lengths: list[int], width: int, on_host: bool) -> None:
    """Siblings, children, children's children: each sees the text, its ancestors and itself."""
    network, draw, batch = model(), random.Random(width), len(lengths)
    text = torch.tensor([random_tokens(9, draw) for _ in lengths])
    levels = [torch.tensor([random_tokens(width, draw) for _ in lengths]) for _ in range(3)]
    rows = [torch.tensor([[draw.randrange(width) for _ in range(width)] for _ in lengths]) for _ in range(2)]
    caches = [new_cache(network, batch, 9 + 3 * width) for _ in range(2)]
    for cache in caches:
        network(text, **cache.chain_inputs(9))
        cache.commit(counts(lengths) - 1)
        cache.know_lengths(lengths)
        cache._lengths.is_on_host = on_host
    root, first = torch.full((batch, 1), -1), torch.zeros(batch, width, dtype=torch.int64)
    parents = torch.cat([root, first, rows[0] + 1, rows[1] + 1 + width], 1)
    nodes = torch.cat(levels, 1)
    want = network(nodes, **caches[0].tree_inputs(parents, is_root_committed=True)).logits
    inputs = caches[1].sibling_inputs(width)
    for depth, ids in enumerate(levels):
        if depth:
            inputs = caches[1].child_inputs(inputs, rows[depth - 1])
        got = network(ids, **inputs).logits
        assert_close(got, want[:, depth * width : (depth + 1) * width], f"depth {depth + 1}")


@pytest.mark.parametrize("parents", [[-1, 0, 0, 2, 1], [-1, 0, -1, 1, 0], [-1, 0, 7, 1, 0]], ids=str)
@pytest.mark.parametrize("lengths", [[6], [6, 6], [6, 4]], ids=["one", "even", "ragged"])
def test_trees_that_come_again_have_the_same_inputs(parents: list[int], lengths: list[int]) -> None:
    """Their mask is kept, and must move with the text; other trees in between have masks of their own."""
    network, batch = model(), len(lengths)
    again, other = (torch.tensor([row] * batch) for row in (parents, [-1, 0, 1, 2, 3]))
    caches = [new_cache(network, batch, 40) for _ in range(2)]
    for cache in caches:
        network(torch.ones(batch, 6, dtype=torch.int64), **cache.chain_inputs(6))
        cache.commit(counts(lengths) - 1)
        cache.know_lengths(lengths)
    for links in (again, again, again, other, other, again, again):
        got, want = caches[0].tree_inputs(links), caches[1].tree_inputs(links.clone())
        assert torch.equal(*(inputs["position_ids"].expand(batch, -1) for inputs in (got, want)))
        assert torch.equal(got["attention_mask"], want["attention_mask"])
        for cache, inputs in zip(caches, (got, want), strict=True):
            network(torch.ones(batch, 5, dtype=torch.int64), **inputs)
            cache.commit(1)
            cache.know_lengths(cache.read_lengths().tolist())


def test_a_single_request_of_a_single_token() -> None:
    requests = Requests(model(), [1], random.Random(0))
    for nodes in (1, 5, 1, 2):
        requests.tree_step(nodes)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_second_turn_follows_a_ragged_batch(family: str, attention: str) -> None:
    requests = Requests(model(family, attention), PROMPTS, random.Random(5))
    requests.tree_step(6)
    requests.chain_step(20)  # longer than the window


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "mixtral"])
def test_a_path_that_is_not_moved_is_found(family: str) -> None:
    """The twin of the tests above: the row of a rejected node in place of an accepted one, and they fail."""
    requests = Requests(model(family), [5], random.Random(9))
    cache, tokens = requests.cache, random_tokens(3, requests.rng)
    requests.network(torch.tensor([tokens]), **cache.tree_inputs(torch.tensor([[-1, 0, 0]])))
    cache.commit(counts([1]), torch.tensor([[1]]))  # accepted was node 2
    logits = requests.network(torch.tensor([[7]]), past_key_values=cache).logits[0]
    requests.alone[0].feed([tokens[0], tokens[2]])
    assert float((logits - requests.alone[0].feed([7])).abs().max()) > 1e-2


# --- a cache like any other


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_plain_calls_need_nothing_but_the_cache(family: str, attention: str) -> None:
    network, texts = model(family, attention), torch.randint(1, VOCAB, (3, 17))
    ours, theirs = new_cache(network), DynamicCache(config=network.config)
    for start, end in ((0, 9), (9, 10), (10, 14), (14, 15), (15, 17)):
        got = network(texts[:, start:end], past_key_values=ours).logits
        assert_close(got, network(texts[:, start:end], past_key_values=theirs).logits, f"{start} to {end}")
    assert ours.get_seq_length() == 17


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_left_padded_prompts_decode_as_with_a_growing_cache(family: str, attention: str) -> None:
    network, texts = model(family, attention), torch.randint(1, VOCAB, (3, 12))
    mask = (torch.arange(12) >= torch.tensor([[0], [4], [9]])).long()
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    ours, theirs = new_cache(network), DynamicCache(config=network.config)
    for start, end in ((0, 10), (10, 11), (11, 12)):
        step = {"attention_mask": mask[:, :end], "position_ids": position[:, start:end]}
        got = network(texts[:, start:end], past_key_values=ours, **step).logits
        want = network(texts[:, start:end], past_key_values=theirs, **step).logits
        if start == 0:  # a row of padding attends nothing; what it says is nobody's business
            got, want = got[mask[:, :end] > 0], want[mask[:, :end] > 0]
        assert_close(got, want, f"{start} to {end}")


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_generate_takes_it_and_rolls_it_back(family: str, attention: str) -> None:
    network, prompt = model(family, attention), torch.tensor([[5, 6, 7, 5, 6]])
    how = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    want = network.generate(prompt, **how)
    for assistance in (
        {},
        {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
        {"assistant_model": model("llama", seed=1)},
    ):
        got = network.generate(prompt, past_key_values=new_cache(network, 1), **how, **assistance)
        assert torch.equal(got, want), sorted(assistance)


def test_beams_are_reordered() -> None:
    network, prompt = model(), torch.tensor([[5, 6, 7]])
    how = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    got = network.generate(prompt, past_key_values=new_cache(network, 3), **how)
    assert torch.equal(got, network.generate(prompt, **how))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_crop_takes_back_what_forwards_wrote(family: str) -> None:
    network, texts = model(family), torch.randint(1, VOCAB, (2, 20))
    cache = new_cache(network, 2)
    want = network(texts, past_key_values=new_cache(network, 2)).logits
    network(texts[:, :12], past_key_values=cache)
    cache.commit(counts([11, 11]))
    network(texts[:, 5:9], past_key_values=cache)  # on a wrong track
    cache.crop(-3)
    cache.crop(0)
    assert cache.get_seq_length() == 13
    cache.crop(-5)  # its first token, and four that were committed
    assert cache.lengths.tolist() == [8, 8]
    assert_close(network(texts[:, 8:], past_key_values=cache).logits, want[:, 8:], "after crop")


def test_crop_of_a_ragged_batch_and_reset() -> None:
    requests = Requests(model(), PROMPTS, random.Random(1))
    requests.cache.crop(-3)
    assert requests.cache.lengths.tolist() == [0, 4, 1]
    requests.cache.reset()
    assert requests.cache.get_seq_length() == 0
    assert not any(bool(layer.keys.any()) for layer in requests.cache.layers)


def test_a_cache_takes_requests_only_while_it_is_empty() -> None:
    requests = Requests(model(), PROMPTS, random.Random(1))
    parts = [(requests.cache, range(len(PROMPTS)))]
    with pytest.raises(ValueError, match="take must be called on an empty cache of 3 requests"):
        requests.cache.take(parts)


# --- memory


def test_buffers_never_move_and_nothing_around_them_is_touched() -> None:
    requests = Requests(model("gemma3"), PROMPTS, random.Random(2), capacity=60)
    frames = []
    for layer in requests.cache.layers:
        for name in ("keys", "values"):
            inner = getattr(layer, name)
            frame = torch.full((len(inner) + 2, *inner.shape[1:]), torch.nan)  # read by mistake, it spoils the logits
            frame[1:-1] = inner
            setattr(layer, name, frame[1:-1])
            frames.append(frame)
    requests.cache._layout = None
    places = [t.data_ptr() for layer in requests.cache.layers for t in (layer.keys, layer.values)]
    while int(requests.cache.lengths.max()) + 8 <= 60:
        requests.tree_step(8)
    assert [t.data_ptr() for layer in requests.cache.layers for t in (layer.keys, layer.values)] == places
    for frame in frames:
        assert int(frame.isnan().sum()) == 2 * frame[0].numel()


def test_committed_rows_stay_bit_for_bit_and_the_path_moves_behind_them() -> None:
    requests = Requests(model(), [9, 5], random.Random(4))
    network, cache = requests.network, requests.cache
    parents = torch.tensor([[-1, 0, 0, 1, 2]] * 2)
    network(torch.randint(1, VOCAB, (2, 5)), **cache.tree_inputs(parents))
    before = [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]
    cache.commit(counts([2, 0]), padded([[2, 4], []], 5), zero_tail=True)
    after = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[0, :, :12], old[0][:, [*range(10), 11, 13]])
        assert torch.equal(new[1, :, :6], old[1, :, :6])
        assert not bool(new[0, :, 12:].any() or new[1, :, 6:].any())


class Allocations(TorchDispatchMode):
    """Elements of every tensor that an operator makes; views and what is written in place make none."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        made = result if isinstance(result, tuple | list) else [result]
        self.elements += [
            t.numel() for t in made if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known
        ]
        return result


@pytest.mark.parametrize("even", [True, False])
def test_a_step_makes_nothing_that_grows_with_the_length(even: bool) -> None:
    made = []
    for capacity in (64, 4096):
        cache = new_cache(model(), 2, capacity)
        lengths = counts([capacity - 12, capacity - 12 if even else capacity - 20])
        for layer in cache.layers:
            layer.update(*torch.randn(2, 2, 2, capacity - 10, 8))
        cache.commit(lengths)
        new = torch.randn(2, 2, 2, 4, 8)
        cache.layout  # described once  # noqa: B018
        with Allocations() as allocations:
            views = [layer.update(*new) for layer in cache.layers]
            cache.commit(counts([2, 1]), padded([[1, 3], [2]], 4))
        assert views[0][0].data_ptr() == cache.layers[0].keys.data_ptr()
        made.append(allocations.elements)
    assert made[0] == made[1]
    assert max(made[0]) <= 2 * 2 * 4 * 8


# --- lengths that only the device knows, as on a GPU


def test_a_loose_bound_is_read_at_the_capacity_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(model("gemma3"), PROMPTS, random.Random(6), capacity=48)
    lengths, reads = requests.cache._lengths, []
    learn, lengths.is_on_host = lengths.read, False
    monkeypatch.setattr(lengths, "read", lambda: reads.append(lengths.longest) or learn())
    while int(requests.cache.lengths.max()) + 6 <= 48:
        requests.tree_step(6)
    assert 1 <= len(reads) < 12
    assert lengths.longest >= int(requests.cache.lengths.max())
    assert requests.cache.read_lengths().tolist() == [len(t) for t in requests.texts]


# --- bad input


def test_a_flagged_request_keeps_nothing_and_harms_no_other() -> None:
    requests = Requests(model(), [3, 3, 3, 3], random.Random(7))
    parents = torch.tensor([[-1, 0, 0, 1]] * 4)
    requests.network(torch.randint(1, VOCAB, (4, 4)), **requests.cache.tree_inputs(parents))
    path = torch.tensor([[1, 3, -1, -1], [3, 1, -1, -1], [1, 2, 3, 3], [2, -1, -1, -1]])
    assert requests.cache.commit(counts([2, 2, 4, 1]), path).tolist() == [0, 32, 32, 0]
    assert requests.cache.lengths.tolist() == [6, 3, 3, 5]
    requests.network(torch.randint(1, VOCAB, (4, 2)), **requests.cache.chain_inputs(2))
    assert requests.cache.commit(counts([1, 2, -1, -2])).tolist() == [0, 32, 0, 32]
    assert requests.cache.lengths.tolist() == [8, 3, 3, 5]


def test_a_malformed_path_whose_last_number_is_right_is_flagged() -> None:
    """A path in place is not looked at again, so every number must say that it is in place."""
    paths = torch.tensor([[1, 2, 3], [2, 2, 3], [-1, 2, 3], [0, 2, 3], [1, 1, 3]])
    requests = Requests(model(), [3] * len(paths), random.Random(8))
    parents = torch.tensor([[-1, 0, 1, 2]] * len(paths))
    requests.network(torch.randint(1, VOCAB, (len(paths), 4)), **requests.cache.tree_inputs(parents))
    assert requests.cache.commit(counts([3] * len(paths)), paths).tolist() == [0, 32, 32, 32, 32]
    assert requests.cache.lengths.tolist() == [7, 3, 3, 3, 3]


def test_a_full_cache_says_how_much_it_lacks() -> None:
    network, cache = model(), new_cache(model(), 2, capacity=8)
    network(torch.ones(2, 6, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match=r"capacity must be at least 9 for 9 tokens that are not committed .*, got 8"):
        network(torch.ones(2, 3, dtype=torch.long), past_key_values=cache)
    cache.commit(counts([5, 3]))
    with pytest.raises(ValueError, match="capacity must be at least 9"):
        cache.tree_inputs(torch.tensor([[-1, 0, 0]] * 2))
    network(torch.ones(2, 2, dtype=torch.long), **cache.chain_inputs(2))


def test_a_ragged_batch_without_a_mask_is_refused() -> None:
    requests = Requests(model(), PROMPTS, random.Random(8))
    token, told = torch.ones(3, 1, dtype=torch.long), "call the model with chain_inputs or tree_inputs"
    with pytest.raises(ValueError, match=told):
        requests.network(token, past_key_values=requests.cache)
    inputs = requests.cache.chain_inputs(1)
    assert requests.cache.get_seq_length() == max(PROMPTS)  # some models ask, though they are given positions
    requests.network(token, **inputs)
    with pytest.raises(ValueError, match=told):
        requests.network(token, past_key_values=requests.cache)
    requests.cache.commit(counts([0, -1, 0]))
    with pytest.raises(ValueError, match=told):
        requests.network(token, past_key_values=requests.cache)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (torch.zeros(3, 2, 1, 8), r"keys must be \[2, 2, 1, 8\] .*, got \[3, 2, 1, 8\]"),
        (torch.zeros(2, 4, 1, 8), r"keys must be \[2, 2, 1, 8\] .*, got \[2, 4, 1, 8\]"),
        (torch.zeros(2, 2, 1, 8, dtype=torch.bfloat16), "keys must be torch.float32, .*, got torch.bfloat16"),
        (torch.zeros(2, 2, 1, 8, device="meta"), "keys must be on cpu, .*, got meta"),
        (torch.zeros(2, 2, 1, 8, requires_grad=True), "keys must be without gradient"),
    ],
    ids=["batch", "heads", "dtype", "device", "gradient"],
)
def test_rows_that_do_not_fit_are_refused(keys: Tensor, message: str) -> None:
    layer = new_cache(model(), 2).layers[0]
    layer.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8))
    with pytest.raises(ValueError, match=message):
        layer.update(keys, keys)


def test_calls_that_make_no_sense_are_refused() -> None:
    network, cache, wrong = model(), new_cache(model(), 2), torch.tensor([[-1, 0, 0]] * 3)
    for _ in range(3):  # what was refused is not remembered
        with pytest.raises(ValueError, match="tree_mask: past must be"):
            cache.tree_inputs(wrong)
    with pytest.raises(ValueError, match="is_root_committed must be False where nothing is committed"):
        cache.tree_inputs(torch.tensor([[-1, 0, 0]] * 2), is_root_committed=True)
    with pytest.raises(ValueError, match="commit must be called after a forward"):
        cache.commit(counts([0, 0]))
    network(torch.ones(2, 3, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match="parents must be of more than the 3 nodes"):
        cache.tree_inputs(torch.tensor([[-1, 0, 1]] * 2))
    with pytest.raises(ValueError, match="num_accepted must be a tensor"):
        cache.commit([1, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_accepted must be"):
        cache.commit(counts([1]))
    with pytest.raises(ValueError, match="sibling_inputs must be called right after a commit"):
        cache.sibling_inputs(2)
    with pytest.raises(ValueError, match=r"num_accepted must be an int in \[-1, 3\) of chains, .* got 3"):
        cache.commit(3)
    with pytest.raises(ValueError, match="tokens_to_remove must be minus the number of tokens, got 2"):
        cache.crop(2)
    with pytest.raises(ValueError, match="requests cannot be left out"):
        cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ValueError, match="cannot be repeated"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="batch must be a host int >= 1, got 0"):
        new_cache(network, 0)


def test_other_attention_is_refused_by_name() -> None:
    config = type(model().config)(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"])
    sizes = {"batch": 1, "capacity": 8, "dtype": torch.float32, "device": "cpu"}
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not served: .* its masks end at chunks"):
        TreeCache(config, **sizes)
    cache = TreeCache(model("llama", "eager").config, **sizes)
    cache._config = type(model().config)(attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match="attn_implementation must be sdpa or eager:"):
        cache.tree_inputs(torch.tensor([[-1]]))


def test_importing_the_package_needs_torch_alone() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; import specdec_kernels, specdec_loop\n"
        "try: specdec_loop.TreeCache\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout == "specdec_loop needs transformers 5.16 or later: pip install 'transformers>=5.16'\n", done


def test_a_forward_that_calls_its_cache_so_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """From transformers 5.24 on it is `cache`, in earlier ones `past_key_values`."""
    network, ids = model(), torch.tensor([[5, 6, 7]])
    want, plain, name = network(ids).logits, type(network).forward, cache_argument(network.config)

    def forward(self: Any, input_ids: Tensor, cache: Any = None, position_ids: Any = None, **more: Any) -> Any:
        return plain(self, input_ids, position_ids=position_ids, **{name: cache}, **more)

    monkeypatch.setattr(type(network), "forward", forward)
    check_model(network.config, network)
    inputs = new_cache(network, 1).chain_inputs(3)
    assert "cache" in inputs and "past_key_values" not in inputs
    assert_close(network(ids, **inputs).logits, want, "three tokens")


def test_a_tree_that_came_before_is_another_behind_a_committed_root() -> None:
    """Its root is not run again, and lies one place earlier."""
    network, parents = model(), torch.tensor([[-1, 0, 0, 1]] * 2)
    found = []
    for comes_again in (True, False):
        cache = new_cache(network, 2, 32)
        network(torch.ones(2, 5, dtype=torch.long), **cache.chain_inputs(5))
        cache.commit(4)
        if comes_again:
            cache.tree_inputs(parents)
        found.append(cache.tree_inputs(parents, is_root_committed=True))
    for name in ("position_ids", "attention_mask"):
        assert torch.equal(found[0][name], found[1][name]), name
    assert found[0]["position_ids"].tolist() == [[5, 5, 6]] * 2
