"""Block drafters: heads in both published formats beside the public code, their caches, trees and distributions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_texts import distribution, many, surprise, tiny
from head_models import block_head, medusa, run_block, shaken
from models import VOCAB, model
from safetensors.torch import load_file, save_file
from speculators_package import speculators
from texts import prompts, text_of
from torch import Tensor
from transformers import Qwen3Config

from specdec_kernels import Sampling
from specdec_loop import heads
from specdec_loop.drafters import BlockDrafter, BlockTree, Drafter, MedusaBestTree
from specdec_loop.drafters.marginals import MarginalTree
from specdec_loop.generation import generate

FALSE_ALARM = 1e-6  # of each distribution test below; seeds are fixed, so an alarm would stay
TOKENS, SEED = 24, 3
WHY = "the public code is not installed, see requirements/references.txt"
LAYERS = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip


# --- files, beside the public code


@pytest.mark.parametrize("has_bias", [False, True])
def test_z_labs_heads_say_what_its_own_code_says(tmp_path: Path, has_bias: bool) -> None:
    public = pytest.importorskip("dflash.model", reason=WHY)
    config = Qwen3Config(
        **LAYERS, attention_bias=has_bias, num_target_layers=2, block_size=5,
        dflash_config={"mask_token_id": 60, "target_layer_ids": [0, 0]},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    own = shaken(public.DFlashDraftModel(config))
    own.save_pretrained(tmp_path)
    head, target = heads.load_dflash(tmp_path, model()), model()
    assert (head.levels, head.block_size, head.longest, head.mask_id) == ((1, 1), 5, 4, 60)
    hidden, last = torch.randn(2, 7, 64), torch.tensor([[5], [9]])
    noise = target.get_input_embeddings()(head.masked(last, 4))
    rows = own(position_ids=torch.arange(12)[None], noise_embedding=noise, target_hidden=hidden)
    want = own.compute_logits(rows, target.lm_head)
    got = head.logits(run_block(head, last, hidden, torch.arange(7)[None]))
    assert torch.allclose(got, want, atol=1e-4) and want.std() > 0.1
    run(BlockDrafter(head), 2, Sampling.full(2))


@pytest.mark.parametrize("starts_early", [False, True])
@pytest.mark.parametrize("draft_ids", [None, [i for i in range(VOCAB) if i % 3]], ids=["all ids", "some ids"])
def test_heads_of_speculators_say_what_its_own_code_says(
    tmp_path: Path, draft_ids: list[int] | None, starts_early: bool
) -> None:
    package, ids, target = speculators(), draft_ids or list(range(VOCAB)), model()
    made = package.DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**LAYERS, attn_implementation="eager"), draft_vocab_size=len(ids),
        block_size=4, aux_hidden_state_layer_ids=[0, 1], mask_token_id=60, sample_from_anchor=starts_early,
    )  # fmt: skip
    own = shaken(package.DFlashDraftModel(made))
    if draft_ids is None:
        own.lm_head.weight.copy_(target.lm_head.weight)
    else:
        own.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
        own.t2d[ids] = True
    own.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    own.save_pretrained(tmp_path)
    head = heads.load_dflash(tmp_path, target)
    assert (head.levels, head.longest) == ((0, 1), 3 + starts_early)
    assert (head.token_map is None) if draft_ids is None else (head.token_map.tolist() == draft_ids)

    text, hidden, ones = torch.randint(VOCAB - 1, (1, 12)), torch.randn(1, 12, 64), torch.ones(1, 12).long()
    _, logits, _, _, places = own._backbone_forward(
        hidden, text, ones, torch.randn(1, 12, 32), torch.zeros(1, 12).long(), max_anchors=8
    )
    for block, place in enumerate(places.view(8, 4)[:, 0].tolist()):
        if place:  # behind no text there is nothing to compare
            past = torch.arange(place)[None]
            got = head.logits(run_block(head, text[:, place : place + 1], hidden[:, :place], past))
            assert torch.allclose(got, logits[:, 4 * block : 4 * block + 4], atol=1e-4), f"block at {place}"
    run(BlockDrafter(head), 2, Sampling.full(2))


FIELDS = {"block_size": 5, "dflash_config": {"mask_token_id": 60, "target_layer_ids": [0]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": None}, r"block_size is missing"),
        ({"dflash_config": {"mask_token_id": 60}}, "target_layer_ids is missing"),
        ({"dflash_config": {"mask_token_id": 61, "target_layer_ids": [0]}}, r"mask_token_id must be in \[0, 61\)"),
        ({"dflash_config": {"mask_token_id": 60, "target_layer_ids": [1]}}, r"levels must be below 2.*got \[2\]"),
        ({"dflash_config": {**FIELDS["dflash_config"], "output_multiplier": 0.5}}, "output_multiplier must be 1"),  # type: ignore[dict-item]
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"num_target_layers": 99}, "num_target_layers must be 2, the target's, got 99"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be full_attention, got"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures must not be DFlash2DraftModel"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type must be dflash, got dspark"),
        ({"num_hidden_layers": 3}, r"missing: .*layers\.2"),
        ({"num_hidden_layers": 1}, r"not expected: .*layers\.1"),
        ({"intermediate_size": 40}, r"must be \[.*40.*\], got"),
    ],
)
def test_a_head_of_another_layout_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    made = block_head(model(), levels=(1,))
    heads.save_head(made, tmp_path, {**made.fields, **FIELDS})
    assert heads.load_dflash(tmp_path, model()).levels == (1,)
    (tmp_path / "config.json").write_text(json.dumps({**made.fields, **FIELDS, **change}))
    with pytest.raises(ValueError, match=message):
        heads.load_dflash(tmp_path, model())


def test_an_output_matrix_must_fit_its_ids(tmp_path: Path) -> None:
    made = block_head(model(), [i for i in range(VOCAB) if i % 3])
    heads.save_head(made, tmp_path, made.fields)
    with pytest.raises(ValueError, match=r"lm_head\.weight must have a row for each id of the target, got 40 rows"):
        heads.load_dflash(tmp_path, model())


CHOSEN = torch.tensor([i for i in range(VOCAB) if i % 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": torch.full((40,), 50)}, r"d2t must lead to ids in \[0, 61\), got 50 to 89"),
        ({"lm_head.weight": None}, r"missing: lm_head\.weight, of the 40 ids"),
        ({"embed_tokens.weight": torch.zeros(7, 32)}, r"embed_tokens\.weight must be .*, got \[7, 32\]"),
        ({"embed_tokens.weight": torch.zeros(61, 16)}, r"embed_tokens\.weight must be .*, got \[61, 16\]"),
    ],
    ids=["ids", "no output", "rows", "width"],
)
def test_ids_and_embeddings_must_fit_the_target(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    made = block_head(model(), CHOSEN.tolist())
    heads.save_head(made, tmp_path, made.fields)
    path = tmp_path / "model.safetensors"
    tensors = {**load_file(path), "d2t": CHOSEN - torch.arange(len(CHOSEN)), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(ValueError, match=message):
        heads.load_dflash(tmp_path, model())


def test_a_folder_without_a_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors or"):
        heads.load_dflash(tmp_path, model())


# --- what is drafted


def run(drafter: Drafter | None, batch: int, sampling: Sampling, **more: Any) -> Any:
    result = generate(model(), drafter, prompts(batch), sampling=sampling, max_new_tokens=TOKENS, seed=SEED, **more)
    assert not any(result.status)
    return result


def whole_block(head: Any, row: list[int], length: int) -> Tensor:
    """Logits ``[length, draft_vocab]`` behind a text, with the target run anew and no cache of earlier steps."""
    hidden = model()(torch.tensor([row[:-1]]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[level] for level in head.levels], -1)
    rows = run_block(head, torch.tensor([row[-1:]]), states, torch.arange(len(row) - 1)[None], length)
    return head.logits(rows[0, -length:])


@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("starts_early", [False, True])
@pytest.mark.parametrize("shape", [BlockDrafter, BlockTree])
def test_blocks_are_those_of_the_whole_text(shape: Any, starts_early: bool, rule: str) -> None:
    """At every step of a ragged batch, behind drafts that were accepted in part."""
    if rule not in shape.rules:
        rule = "target_only"
    drafter, compared = shape(block_head(model(), starts_early=starts_early)), []
    block = drafter._block

    def checked(sequences: Any, length: int) -> Tensor:
        logits = block(sequences, length)
        for b, row in enumerate(sequences.rows):
            if not sequences.is_finished[b]:
                want = whole_block(drafter.head, row, length)
                assert torch.allclose(logits[b], want, atol=1e-4), f"request {b} of {len(row)} tokens"
                compared.append(len(row))
        return logits

    drafter._block = checked
    more = {"draft_length": drafter.head.longest, "rule": rule}
    result = run(drafter, 7, Sampling.full(7, temperature=0.8), **more)
    accepted = [n for r in result.statistics for n in r.accepted]
    assert len(compared) > 30 and {0, 1} <= set(accepted)


def test_a_tree_holds_the_likeliest_prefixes() -> None:
    """Beside all prefixes, sorted."""
    drafter, rows = BlockTree(block_head(model()), width=3, total=9), [[5, 6, 7], [8, 1, 2], [3, 9, 4]]
    sequences = text_of(*rows)
    drafter.begin(sequences, rule="greedy", sampling=Sampling.full(3), longest=3)
    states = model()(torch.tensor(rows)[:, :-1], output_hidden_states=True).hidden_states
    drafter.prefill(sequences, torch.cat([states[level] for level in drafter.features], -1))
    draft = drafter.draft(sequences, 3)
    assert draft.token_ids.shape == (3, 10) and draft.max_depth == 3
    assert draft.parents is not None and draft.logits is None
    for b, row in enumerate(rows):
        best = whole_block(drafter.head, row, 3).log_softmax(-1).topk(3)
        every: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for values, ids in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            deepest = max(len(path) for _, path in every)
            ends = [(score, path) for score, path in every if len(path) == deepest]
            every += [(s + v, (*path, i)) for s, path in ends for v, i in zip(values, ids, strict=True)]
        want = {path for _, path in sorted(every, reverse=True)[:10]}
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, 10):
            paths.append((*paths[int(draft.parents[b, node])], int(draft.token_ids[b, node])))
        assert set(paths) == want


@pytest.mark.parametrize("make", [lambda: BlockTree(block_head(model())), lambda: MedusaBestTree(medusa())])
def test_a_tree_differs_from_step_to_step_and_keeps_the_text_without_a_temperature(make: Any) -> None:
    """Where none is given all requests sample at 1."""
    drafter, shapes = make(), []
    draft = drafter.draft

    def watched(sequences: Any, length: int) -> Any:
        made = draft(sequences, length)
        shapes.append(made.parents)
        return made

    drafter.draft = watched
    assert run(drafter, 3, Sampling()).tokens == run(None, 3, Sampling()).tokens
    assert len(torch.cat(shapes).unique(dim=0)) > 5


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"BlockTree: width must be in \[1, 64\], got 0"):
        BlockTree(block_head(model()), width=0)
    with pytest.raises(ValueError, match=r"MedusaBestTree: total must be in \[1, 1023\], got 1024"):
        MedusaBestTree(medusa(), total=1024)


def test_a_wide_tree_is_as_deep_as_its_candidates_may_be() -> None:
    tree = MarginalTree(depth=40, width=64, total=1000)
    assert tree._depth(40) == 2048 // 64


# --- the distribution


@pytest.mark.parametrize("draft_ids", [None, [0, 2, 3]], ids=["all ids", "some ids"])
@pytest.mark.parametrize(
    ("shape", "rule"),
    [(BlockDrafter, "ratio"), (BlockDrafter, "block"), (BlockTree, "recursive"), (BlockTree, "target_only")],
)
def test_drafts_leave_the_distribution_alone(shape: Any, rule: str, draft_ids: list[int] | None) -> None:
    options = {"width": 2, "total": 4} if shape is BlockTree else {}
    drafter = shape(block_head(tiny(0), draft_ids), **options)
    result = generate(tiny(0), drafter, rule=rule, draft_length=3, **many())
    assert surprise(result.tokens, distribution(tiny(0), 1.0)) > FALSE_ALARM
    accepted = sum(r.accepted[0] > 0 for r in result.statistics) / len(result.tokens)
    assert 0.1 < accepted < 0.98  # or nothing would have been tested


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_drafts_from_another_distribution_are_seen(rule: str) -> None:
    class Liar(BlockDrafter):
        def draft(self, sequences: Any, length: int) -> Any:
            made = super().draft(sequences, length)
            return made._replace(sampling=Sampling.full(sequences.batch, temperature=3.0), stats=None)

    result = generate(tiny(0), Liar(block_head(tiny(0))), rule=rule, draft_length=3, **many())
    assert surprise(result.tokens, distribution(tiny(0), 1.0)) < FALSE_ALARM
