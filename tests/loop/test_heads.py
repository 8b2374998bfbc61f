"""Heads and the drafters that use them: texts, distributions, caches, and files as they are published."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_texts import REQUESTS, distribution, many, surprise, tiny
from head_models import (
    DRAFTERS,
    HEADS,
    LOADS,
    block_head,
    config,
    draft_model,
    feature_head,
    medusa,
    run_block,
    watch,
)
from models import SIZES, VOCAB, model
from safetensors.torch import save_file
from texts import assert_same, prompts, text_of
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specdec_kernels import Sampling
from specdec_loop import heads
from specdec_loop.drafters import (
    Blockwise,
    Drafter,
    DraftModel,
    EagleDynamicTree,
    EagleTree,
    HeadChain,
    Medusa,
    ParallelChain,
)
from specdec_loop.drafters.feature_drafter import FeatureDrafter
from specdec_loop.generation import generate
from specdec_loop.sequences import Sequences

FALSE_ALARM = 1e-6  # of each distribution test below; seeds are fixed, so an alarm would stay
TOKENS, SEED = 24, 3
MIXED = Sampling(torch.tensor([0.0, 0.8, 0.0, 1.0, 0.5, 0.0, 1.3]), top_p=torch.tensor([1, 0.9, 0.9, 1, 1, 0.5, 1.0]))


def run(drafter: Drafter | None, batch: int, sampling: Sampling, **more: Any) -> list[list[int]]:
    result = generate(model(), drafter, prompts(batch), sampling=sampling, max_new_tokens=TOKENS, seed=SEED, **more)
    assert not any(result.status)
    return result.tokens


# --- the text is that of plain decoding


@pytest.mark.parametrize("batch", [1, 7], ids=["alone", "ragged batch"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_seeded_text_is_that_of_plain_decoding(name: str, kind: str, batch: int) -> None:
    sampling = Sampling.full(batch, temperature=0.0 if kind == "greedy" else 0.8)
    if kind == "mixed":
        sampling = Sampling(*(None if x is None else x[:batch] for x in MIXED))
    got, want = run(DRAFTERS[name](), batch, sampling), run(None, batch, sampling)
    assert_same(got, want, model(), prompts(batch), sampling, SEED)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rule_greedy_is_greedy_decoding(name: str) -> None:
    cold = Sampling.full(7, temperature=0.0)
    got = run(DRAFTERS[name](), 7, Sampling.full(7, temperature=0.9), rule="greedy")
    assert_same(got, run(None, 7, cold), model(), prompts(7), cold, SEED)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_rule_of_a_drafter_runs_and_drafts_of_any_length_fit(name: str) -> None:
    drafter = DRAFTERS[name]()
    for rule in drafter.rules:
        for length in (1, 3):
            run(drafter, 3, Sampling(*(None if x is None else x[:3] for x in MIXED)), rule=rule, draft_length=length)


# --- the head's cache


@pytest.mark.parametrize("shape", [EagleTree, EagleDynamicTree, HeadChain])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_the_cache_of_a_head_holds_what_the_whole_text_says(kind: str, shape: type[FeatureDrafter]) -> None:
    drafter = shape(feature_head(kind, model()))

    def whole(row: Tensor) -> Tensor:
        hidden = model()(row[:, :-1], output_hidden_states=True).hidden_states
        features = drafter.head.fuse(torch.cat([hidden[level] for level in drafter.features], -1))
        return drafter.head(row[:, 1:], features, torch.arange(row.shape[1] - 1)[None])[0, -1]

    compared = watch(drafter, whole)
    run(drafter, 7, Sampling.full(7, temperature=0.8))
    assert len(compared) > 30


def test_a_level_of_a_tree_sees_its_own_branch_alone() -> None:
    """The drafts of a fixed tree are those of the head run along each branch by itself."""
    head, starts = feature_head("eagle", model()), prompts(7)
    drafter = EagleTree(head, [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
    drafts: list[Any] = []
    drafter.draft = lambda text, length: drafts.append(EagleTree.draft(drafter, text, length)) or drafts[-1]  # type: ignore[method-assign,func-returns-value]
    said = generate(model(), drafter, starts, sampling=Sampling.full(7, temperature=0.0), max_new_tokens=2).tokens
    for b, start in enumerate(starts):
        ids, start = drafts[0].token_ids[b].tolist(), [*start, said[b][0]]
        for branch, children in (((), (1, 5)), ((1,), (2, 3)), ((5,), (6,)), ((1, 3), (4,))):
            row = torch.tensor([start + [ids[n] for n in branch]])
            features = model()(row[:, : len(start) - 1], output_hidden_states=True).hidden_states[-1]
            for _ in range(len(branch) + 1):  # the head goes on from its own features
                seen = features.shape[1]
                out = head(row[:, 1 : 1 + seen], features, torch.arange(seen)[None])
                features = torch.cat([features, out[:, -1:]], 1)
            best = head.logits(features[:, -1])[0].topk(len(children)).indices.tolist()
            assert [ids[n] for n in children] == best, f"request {b}, behind nodes {branch}"


def test_the_tree_that_ranks_alone_choose_is_the_one_that_grows() -> None:
    drafter = EagleDynamicTree(feature_head("eagle", model()), width=2, total=3)
    distributions = [Sampling.full(7, temperature=0.8, top_k=top_k) for top_k in (None, 0)]  # given, but off: it grows
    both = [
        generate(model(), drafter, prompts(7), sampling=s, max_new_tokens=TOKENS, draft_length=2) for s in distributions
    ]
    known, grown = ([(r.drafted, r.accepted, r.children) for r in result.statistics] for result in both)
    assert known == grown and sum(sum(r[1]) for r in known) > 10


# --- the distribution


@pytest.mark.parametrize(
    ("shape", "rule", "kind"),
    [
        (EagleTree, "recursive", "eagle"),
        (EagleTree, "recursive", "eagle3"),
        (EagleTree, "traversal", "mtp"),
        (EagleDynamicTree, "target_only", "eagle"),
        (EagleDynamicTree, "target_only", "eagle3"),
        (HeadChain, "ratio", "mtp"),
        (HeadChain, "block", "eagle3"),
        (HeadChain, "ratio", "eagle"),
        (ParallelChain, "ratio", "peagle"),
        (ParallelChain, "block", "peagle"),
    ],
)
def test_drafts_leave_the_distribution_alone(shape: Any, rule: str, kind: str) -> None:
    head = feature_head(kind, tiny(0), draft_ids=[0, 2, 3])
    options = {"width": 2, "total": 6} if shape is EagleDynamicTree else {}
    if shape is EagleTree:
        options = {"choices": [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]}
    result = generate(tiny(0), shape(head, **options), rule=rule, draft_length=3, **many())
    assert surprise(result.tokens, distribution(tiny(0), 1.0)) > FALSE_ALARM
    accepted = sum(r.accepted[0] > 0 for r in result.statistics) / len(result.tokens)
    assert 0.1 < accepted < 0.98  # or nothing would have been tested


def test_drafts_colder_than_any_race_leave_the_distribution_alone() -> None:
    """They race at a higher temperature, 1e-4: the verifier may not take that for the one asked for."""
    head = feature_head("peagle", tiny(0), [0, 2, 3])
    drafter = ParallelChain(head, sampling=Sampling.full(REQUESTS, temperature=2e-5))
    result = generate(tiny(0), drafter, rule="ratio", draft_length=3, **many())
    assert surprise(result.tokens, distribution(tiny(0), 1.0)) > FALSE_ALARM
    assert sum(r.accepted[0] > 0 for r in result.statistics) > 0.05 * REQUESTS


def test_siblings_from_another_distribution_are_seen() -> None:
    class Liar(EagleTree):
        def draft(self, sequences: Sequences, length: int) -> Any:
            return super().draft(sequences, length)._replace(sampling=Sampling.full(sequences.batch, temperature=3.0))

    liar = Liar(feature_head("eagle", tiny(0)), [(0,), (1,), (0, 0)])
    result = generate(tiny(0), liar, rule="recursive", draft_length=3, **many())
    assert surprise(result.tokens, distribution(tiny(0), 1.0)) < FALSE_ALARM


class NoLanes(EagleTree):
    """Nodes of one depth share their random numbers."""

    def _draw(self, logits: Tensor, sequences: Any, ahead: int, count: int = 1, lanes: Tensor | None = None) -> Any:
        return super()._draw(logits, sequences, ahead, count)


def test_nodes_of_a_depth_that_share_their_random_numbers_are_seen() -> None:
    choices = [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]
    found = []
    for shape in (EagleTree, NoLanes):
        drafter = shape(feature_head("mtp", tiny(0)), choices)
        result = generate(tiny(0), drafter, rule="traversal", draft_length=2, **many())
        found.append(surprise(result.tokens, distribution(tiny(0), 1.0)))
    assert found[0] > FALSE_ALARM > found[1], found


# --- state and sampling


def test_medusa_drafts_from_the_state_of_the_last_accepted_node() -> None:
    """Also where the accepted path is not that of first children, whose nodes do not follow the root in order."""
    drafter, seen = Medusa(medusa()), []
    draft = drafter.draft

    def checked(sequences: Any, length: int) -> Any:
        for b, row in enumerate(sequences.rows):
            hidden = model()(torch.tensor([row[:-1]]), output_hidden_states=True).hidden_states[-1][0, -1]
            if not sequences.is_finished[b]:
                assert torch.allclose(drafter._state[b], hidden, atol=1e-4), f"request {b} of {len(row)} tokens"
                seen.append(len(row))
        return draft(sequences, length)

    drafter.draft = checked  # type: ignore[method-assign]
    sampling = Sampling.full(7, temperature=0.8)
    result = generate(model(), drafter, prompts(7), sampling=sampling, max_new_tokens=TOKENS, seed=SEED)
    assert len(seen) > 30 and any(max(r.children, default=0) > 0 for r in result.statistics)


@pytest.mark.parametrize("name", ["draft model", "chain", "tree"])
def test_drafts_are_drawn_from_the_drafters_own_sampling(name: str) -> None:
    """At temperature 0 they are the drafts of rule greedy, although the target samples."""
    head, cold = feature_head("mtp", model()), Sampling.full(3, temperature=0.0)
    rule, make = {
        "draft model": ("ratio", lambda **own: DraftModel(model(seed=1), **own)),
        "chain": ("ratio", lambda **own: HeadChain(head, **own)),
        "tree": ("recursive", lambda **own: EagleTree(head, [(0,), (1,), (0, 0)], **own)),
    }[name]
    sequences, hidden = text_of([5, 6, 7], [8, 1, 2], [3, 9, 4]), torch.randn(3, 2, 32)
    drafts = []
    for own, rule_of_it in ((cold, rule), (None, "greedy"), (None, rule)):
        drafter = make(sampling=own)
        drafter.begin(sequences, rule=rule_of_it, sampling=Sampling.full(3, temperature=2.0), longest=2)
        if drafter.features:
            drafter.prefill(sequences, hidden)
        drafts.append(drafter.draft(sequences, 2))
    assert torch.equal(drafts[0].token_ids, drafts[1].token_ids)
    assert not torch.equal(drafts[2].token_ids, drafts[1].token_ids)
    assert (
        drafts[0].sampling is not None and not drafts[0].sampling.temperature.gt(1e-3).any()
    )  # as the verifier is told


# --- Stern et al.


def test_acceptance_of_blocks_grows_from_exact_to_everything() -> None:
    sampling = Sampling.full(3, temperature=0.0)

    def tokens_a_step(rule: str, **options: int) -> float:
        drafter = Blockwise(medusa())
        result = generate(
            model(), drafter, prompts(3), sampling=sampling, rule=rule, rule_options=options, max_new_tokens=TOKENS
        )
        return 3 * TOKENS / sum(len(r.accepted) for r in result.statistics)

    exact = tokens_a_step("greedy")
    assert tokens_a_step("topm", top_m=1) == exact
    assert tokens_a_step("distance", max_distance=0) == exact
    assert exact <= tokens_a_step("topm", top_m=8) <= tokens_a_step("topm", top_m=VOCAB)
    assert exact <= tokens_a_step("distance", max_distance=9) <= tokens_a_step("distance", max_distance=VOCAB)
    assert tokens_a_step("topm", top_m=VOCAB) > 4  # four heads and the target's own token, but for ends of texts
    assert tokens_a_step("topm", top_m=1, min_block=HEADS + 1) == tokens_a_step("topm", top_m=VOCAB)


# --- files


def llama_tensors(prefix: str, inputs: int = 32) -> dict[str, Tensor]:
    """The matrices of a Llama layer of the published files, sized as models.py has them."""
    shapes = {
        "self_attn.q_proj": (32, inputs), "self_attn.k_proj": (16, inputs), "self_attn.v_proj": (16, inputs),
        "self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48),
        "post_attention_layernorm": (32,),
    }  # fmt: skip
    return {f"{prefix}.{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()}


def write(folder: Path, name: str, tensors: dict[str, Tensor], **fields: Any) -> Path:
    """A head as its authors publish one: a Llama configuration and one file."""
    folder.mkdir(exist_ok=True)
    known = {**config(model()).to_dict(), "architectures": ["LlamaForCausalLM"], **fields}
    (folder / "config.json").write_text(json.dumps(known))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("layers", [1, 2])
def test_published_medusa_heads_load(tmp_path: Path, name: str, layers: int) -> None:
    tensors = {}
    for i in range(3):
        for j in range(layers):
            tensors |= {f"{i}.{j}.linear.weight": torch.randn(32, 32), f"{i}.{j}.linear.bias": torch.randn(32)}
        tensors[f"{i}.{layers}.weight"] = torch.randn(VOCAB, 32)
    folder = write(tmp_path, name, tensors, medusa_num_heads=3, medusa_num_layers=layers)
    made, x = heads.load_medusa(folder, model()), torch.randn(2, 32)
    want = x
    for j in range(layers):
        want = want + torch.nn.functional.silu(want @ tensors[f"1.{j}.linear.weight"].T + tensors[f"1.{j}.linear.bias"])
    assert torch.allclose(made(x)[:, 1], want @ tensors[f"1.{layers}.weight"].T, atol=1e-4)
    run(Medusa(made, [(0,), (0, 0), (0, 0, 0)]), 2, Sampling.full(2))


def hf_layer(tensors: dict[str, Tensor], prefix: str) -> LlamaDecoderLayer:
    """Transformers' own layer with these weights, and no norm before attention; a bias that is not there is 0."""
    own = {n.removeprefix(prefix + "."): t for n, t in tensors.items() if n.startswith(prefix)}
    layer = LlamaDecoderLayer(config(model(), attention_bias="self_attn.q_proj.bias" in own), 0)
    layer.input_layernorm = torch.nn.Identity()
    zeros = {n: torch.zeros_like(t) for n, t in layer.state_dict().items() if n.endswith(".bias")}
    layer.load_state_dict(zeros | own)
    return layer


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_embedding", [False, True])
def test_published_eagle_heads_load(tmp_path: Path, has_embedding: bool, has_bias: bool) -> None:
    """With biases as the head of Qwen2 has them: of `fc`, and of queries, keys and values alone."""
    tensors = {**llama_tensors("layers.0"), "fc.weight": torch.randn(32, 64) * 0.1}
    if has_bias:
        sizes = {"fc": 32, **{f"layers.0.self_attn.{n}_proj": size for n, size in (("q", 32), ("k", 16), ("v", 16))}}
        tensors |= {f"{name}.bias": torch.randn(size) for name, size in sizes.items()}
    tensors |= {"embed_tokens.weight": torch.randn(VOCAB, 32)} if has_embedding else {}
    folder = write(tmp_path, "pytorch_model.bin", tensors, bias=has_bias, qkv_bias=has_bias)
    head = heads.load_eagle(folder, model())
    ids, features = torch.randint(VOCAB, (2, 5)), torch.randn(2, 5, 32)
    table = tensors.get("embed_tokens.weight", model().get_input_embeddings().weight)
    joined = torch.cat([table[ids], features], -1)
    x = torch.nn.functional.linear(joined, tensors["fc.weight"], tensors.get("fc.bias"))
    positions = torch.arange(5)[None]
    causal = torch.ones(5, 5).tril().bool()[None, None]
    with torch.no_grad():
        want = hf_layer(tensors, "layers.0")(
            x, attention_mask=causal, position_embeddings=model().model.rotary_emb(x, positions)
        )
    assert torch.allclose(head(ids, features, positions), want, atol=1e-5)
    assert torch.allclose(head.logits(want), want @ model().get_output_embeddings().weight.T, atol=1e-5)
    run(EagleTree(head), 2, Sampling.full(2))


def eagle3_tensors() -> dict[str, Tensor]:
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
    chosen = torch.tensor([i for i in range(VOCAB) if i % 3])
    return {
        **llama_tensors("midlayer", inputs=64),
        **{f"{name}.weight": torch.rand(32) + 0.5 for name in norms},
        "fc.weight": torch.randn(32, 96) * 0.1,
        "lm_head.weight": torch.randn(len(chosen), 32),
        "d2t": chosen - torch.arange(len(chosen)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True),
    }


EAGLE3 = {"draft_vocab_size": 40, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, -1]}}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_published_eagle3_heads_load(tmp_path: Path, name: str) -> None:
    tensors = eagle3_tensors()
    head = heads.load_eagle3(write(tmp_path, name, tensors, **EAGLE3), model())
    assert head.levels == (0, 1, -1)
    assert head.token_map is not None and head.token_map.tolist() == [i for i in range(VOCAB) if i % 3]
    hidden = torch.randn(2, 5, 96)
    assert torch.allclose(head.fuse(hidden), hidden @ tensors["fc.weight"].T, atol=1e-5)

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + model().config.rms_norm_eps).sqrt() * tensors[name + ".weight"]

    # One pair sees itself alone: attention is its value.
    ids, feature = torch.tensor([[7]]), torch.randn(1, 1, 32)
    embedded = model().get_input_embeddings()(ids)
    seen = torch.cat([normed(embedded, "midlayer.input_layernorm"), normed(feature, "midlayer.hidden_norm")], -1)
    value = (seen @ tensors["midlayer.self_attn.v_proj.weight"].T).view(2, 8).repeat_interleave(2, 0).view(1, 1, 32)
    x = feature + value @ tensors["midlayer.self_attn.o_proj.weight"].T
    y = normed(x, "midlayer.post_attention_layernorm")
    gate, up, down = (tensors[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
    want = x + (torch.nn.functional.silu(y @ gate) * (y @ up)) @ down
    got = head(ids, feature, torch.zeros(1, 1).long())
    assert torch.allclose(got, want, atol=1e-5)
    assert torch.allclose(head.logits(got), normed(want, "norm") @ tensors["lm_head.weight"].T, atol=1e-4)
    run(EagleDynamicTree(head), 2, Sampling.full(2))


def test_eagle3_reads_the_levels_of_the_paper() -> None:
    shared = heads.Shared(model())
    shared.layers = 32
    assert heads.Eagle3Head(config(model()), shared).levels == (2, 16, 29)


def test_an_eagle3_head_that_reads_the_last_layer_is_refused(tmp_path: Path) -> None:
    """The target has two layers: state 2 is to be had behind its norm alone."""
    levels = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    write(tmp_path, "model.safetensors", eagle3_tensors(), **{**EAGLE3, "eagle_config": levels})
    with pytest.raises(ValueError, match=r"must be in \[-1, 2\), got"):
        heads.load_eagle3(tmp_path, model())


def saved(tmp_path: Path, network: Any, load: Callable[..., Any]) -> tuple[Any, Any]:
    fields = getattr(network, "fields", None) or (network.config.to_dict() if hasattr(network, "config") else {})
    heads.save_head(network, tmp_path, fields, dtype=torch.float32)
    return network, load(tmp_path, model())


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "mtp"])
def test_what_is_saved_loads_again(tmp_path: Path, kind: str) -> None:
    made, read = saved(tmp_path, feature_head(kind, model()), LOADS[kind][0])
    assert made.state_dict().keys() == read.state_dict().keys()
    assert all(torch.equal(t, read.state_dict()[n]) for n, t in made.state_dict().items())


@pytest.mark.parametrize("own_output", [False, True])
def test_saved_medusa_heads_load_again(tmp_path: Path, own_output: bool) -> None:
    made, read = saved(tmp_path, medusa(own_output=own_output), heads.load_medusa)
    x = torch.randn(3, 32)
    assert torch.equal(made(x), read(x))


def test_a_draft_model_borrows_the_tables_of_the_target(tmp_path: Path) -> None:
    made, read = saved(tmp_path, draft_model(), heads.load_draft_model)
    ids = torch.randint(VOCAB, (1, 6))
    assert torch.allclose(made(ids).logits, read(ids).logits, atol=1e-5)
    own = sum(p.numel() for p in made.model.layers.parameters()) + 32
    assert (tmp_path / "model.safetensors").stat().st_size < 4 * own + 2000


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_head_of_a_target_with_more_ids_is_refused(kind: str, tmp_path: Path) -> None:
    config, head = LlamaConfig(**{**SIZES, "vocab_size": 40}, num_hidden_layers=2), feature_head(kind, model())
    heads.save_head(head, tmp_path, head.config.to_dict())
    with pytest.raises(ValueError, match=r"d2t must lead to ids in \[0, 40\), got 1 to 59"):
        LOADS[kind][0](tmp_path, LlamaForCausalLM(config))


@pytest.mark.parametrize("kind", LOADS)
def test_a_drafter_may_have_a_dtype_of_its_own(tmp_path: Path, kind: str) -> None:
    """It drafts much as it does in the target's, from copies; the target, and its text, stay as they are."""
    target, half = model(), torch.bfloat16
    makes: dict[str, Any] = {
        "dflash": functools.partial(block_head, target),
        "draft": draft_model,
        "medusa": functools.partial(medusa, own_output=False),
    }
    make = makes.get(kind, functools.partial(feature_head, kind, target))
    load, draws = LOADS[kind]
    _, whole = saved(tmp_path, make(), load)
    small = load(tmp_path, target, dtype=half)
    assert all(p.dtype == half for p in small.parameters())
    assert all(p.dtype == torch.float32 for p in [*whole.parameters(), *target.parameters()])
    assert all(b.dtype != half for b in small.buffers())  # angles stay exact

    def logits(head: Any) -> Tensor:
        ids, hidden = torch.arange(1, 6)[None], torch.linspace(-1, 1, 480).view(1, 5, 96)
        if kind == "draft":
            return head(ids).logits
        if kind == "medusa":
            return head(hidden[..., :32])
        if kind == "dflash":
            return head.logits(run_block(head, ids[:, :1], hidden[..., :64], torch.arange(5)[None]))
        features = head.fuse(hidden if kind in ("eagle3", "peagle") else hidden[..., :32])
        return head.logits(head(ids, features, torch.arange(5)[None]))

    near, want = logits(small), logits(whole)
    assert near.dtype == half
    assert (near - want).abs().max() < 0.05 * want.abs().max()
    sampling = Sampling.full(3, temperature=0.8)
    assert_same(run(draws(small), 3, sampling), run(None, 3, sampling), target, prompts(3), sampling, SEED)
    for rule in set(draws.rules) & {"ratio", "block", "recursive", "traversal"}:
        run(draws(small), 3, sampling, rule=rule)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, r"missing: .*fc\.weight"),
        ({"other": torch.zeros(1)}, r"not expected: .*other"),
        ({"fc.weight": torch.zeros(32, 95)}, r"fc\.weight must be \[32, 96\], got \[32, 95\]"),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = {n: t for n, t in {**eagle3_tensors(), **change}.items() if t is not None}
    write(tmp_path, "model.safetensors", tensors, **EAGLE3)
    with pytest.raises(ValueError, match=message):
        heads.load_eagle3(tmp_path, model())


def test_a_folder_without_a_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors or"):
        heads.load_eagle3(tmp_path, model())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Medusa(medusa(), [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)]),
        lambda: EagleTree(feature_head("eagle", model()), [(0,), (2,)]),
        lambda: EagleTree(feature_head("eagle", model()), [(0, 0)]),
        lambda: EagleDynamicTree(feature_head("eagle", model()), width=0),
    ],
)
def test_shapes_that_do_not_fit_are_refused(make: Callable[[], Drafter]) -> None:
    with pytest.raises(ValueError, match=r"must|closed|left out"):
        make()
