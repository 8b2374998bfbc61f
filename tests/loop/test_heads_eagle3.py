"""EAGLE-3 and 3.1 heads as they are published, held against the networks of the package that publishes them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_texts import assert_texts
from head_models import feature_head
from models import VOCAB, model
from safetensors.torch import load_file, save_file
from speculators_package import draft_head, speculators

from specdec_loop import heads
from specdec_loop.drafters import EagleDynamicTree, HeadChain

CHOSEN = [i for i in range(VOCAB) if i % 3]  # drafted ids
EAGLE3: dict[str, dict[str, Any]] = {  # options of the head; layers of Qwen3 have norms of queries and keys
    "3": {},
    "3, Qwen3's layer": {"layers": "qwen3"},
    "normed residual": {"norm_before_residual": True},
    "one norm": {"norm_before_fc": True},
    "3.1": {"fc_norm": True, "norm_output": True},
    "3.1, two of Qwen3's layers": {"fc_norm": True, "norm_output": True, "layers": "qwen3", "num_hidden_layers": 2},
    "whole vocabulary, biases": {"draft_vocab_size": VOCAB, "attention_bias": True},
}


def eagle3_reference(case: str, **layer: Any) -> Any:
    """The package's own network, with random weights."""
    options = {"eagle_aux_hidden_state_layer_ids": [0, 1], "draft_vocab_size": len(CHOSEN), **EAGLE3[case], **layer}
    return draft_head("Eagle3", CHOSEN, **options)


def as_eagle(folder: Path) -> Path:
    """The same head as EAGLE's authors lay it out, and vLLM reads it: one flat configuration, ``midlayer``."""
    fields = json.loads((folder / "config.json").read_text())
    flat = {**fields.pop("transformer_layer_config"), **fields, "model_type": "llama"}
    for name in ("speculators_model_type", "speculators_config", "auto_map"):
        flat.pop(name)
    flat["eagle_config"] = {
        name: flat.pop(name) for name in ("eagle_aux_hidden_state_layer_ids", "norm_before_fc") if name in flat
    }
    (folder / "config.json").write_text(json.dumps(flat))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_steps_equal(head: heads.Eagle3Head, reference: Any) -> None:
    """The logits of three steps from every place of a text, each from the features of the one before."""
    length, steps, said = 9, 3, []
    hidden, ids = torch.randn(1, length, 64), torch.randint(VOCAB, (1, length))
    hook = reference.lm_head.register_forward_hook(lambda module, given, out: said.append(out))
    reference(hidden, ids, torch.zeros(1, length).long(), ttt_steps=steps)
    hook.remove()
    for seen in range(1, length - steps + 2):
        features = head.fuse(hidden[:, :seen])
        for step in range(steps):
            places = torch.arange(seen + step)[None]
            out = head(ids[:, : seen + step], features, places)
            assert torch.allclose(head.logits(out[:, -1]), said[step][:, seen - 1], atol=1e-4), f"{seen}, step {step}"
            features = torch.cat([features, out[:, -1:]], 1)


@pytest.mark.parametrize("case", EAGLE3)
def test_eagle3_heads_are_those_of_speculators(tmp_path: Path, case: str) -> None:
    torch.manual_seed(0)
    reference = eagle3_reference(case)
    reference.save_pretrained(tmp_path)
    for lay_out in (Path, as_eagle):
        head = heads.load_eagle3(lay_out(tmp_path), model())
        assert head.levels == (0, 1)
        assert head.token_map is not None
        assert head.token_map.tolist() == (CHOSEN if reference.use_draft_vocab else list(range(VOCAB)))
        assert_steps_equal(head, reference)
    assert_texts(HeadChain(head), EagleDynamicTree(head, width=3, total=9))


@pytest.mark.parametrize("rope_type", ["default", "linear"])
def test_an_eagle3_head_may_turn_some_dims_alone(tmp_path: Path, rope_type: str) -> None:
    """Transformers' Llama heeds the factor where angles are scaled, here by 1; vLLM heeds it everywhere."""
    speculators()
    partial = importlib.import_module("speculators.models.eagle3.rotary_partial")
    rope = {"rope_type": "linear", "factor": 1.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    partial.install_partial_neox_rotary()
    try:
        reference = eagle3_reference("3", rope_parameters=rope)
        reference.save_pretrained(tmp_path)
        fields = json.loads((tmp_path / "config.json").read_text())
        fields["transformer_layer_config"]["rope_parameters"]["rope_type"] = rope_type
        (tmp_path / "config.json").write_text(json.dumps(fields))
        head = heads.load_eagle3(tmp_path, model())
        assert_steps_equal(head, reference)
    finally:
        partial.uninstall_partial_neox_rotary()
    assert_texts(HeadChain(head))


def test_an_eagle3_head_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    """The package maps four states of 16, which is two of 32."""
    reference = eagle3_reference("3", hidden_size=16, eagle_aux_hidden_state_layer_ids=[0, 1, 2, 3])
    reference.save_pretrained(tmp_path)
    as_eagle(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"target_hidden_size": 32, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    head = heads.load_eagle3(tmp_path, model())
    assert_steps_equal(head, reference)
    assert_texts(HeadChain(head))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: embed_tokens\.weight: the target's are 32 wide"):
        heads.load_eagle3(tmp_path, model())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc_norm": True}, r"missing: .*fc_norm\.0\.weight"),
        ({"norm_before_fc": True}, r"missing: .*input_norm\.weight"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ({"num_hidden_layers": 2}, r"missing: .*layers\.1\.input_layernorm"),
        ({"draft_vocab_size": 7}, r"must be \[7\], got \[40\]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, r"must be in \[-1, 2\)"),
        ({"speculators_model_type": "peagle"}, "must be eagle3, got peagle"),
        ({"model_type": "gemma2"}, "must be llama or qwen3, got gemma2"),
        ({"layer_types": ["sliding_attention"], "use_sliding_window": True}, "must be full_attention"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true"),
    ],
)
def test_an_eagle3_file_that_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    eagle3_reference("3").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for name, value in change.items():
        inside = fields["transformer_layer_config"]
        (inside if name in ("num_hidden_layers", "model_type", "layer_types") else fields)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        heads.load_eagle3(tmp_path, model())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, r"layer_types must be full_attention, got \['sliding_attention'\]"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types must be full_attention"),
        ({"use_sliding_window": True}, "use_sliding_window must be false, got true: a head attends the whole text"),
        ({"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}, None),
        ({"use_sliding_window": False}, None),
    ],
)
def test_windows_of_a_flat_configuration_are_refused_where_they_are_the_heads(
    tmp_path: Path, change: dict[str, Any], message: str | None
) -> None:
    """A configuration that is copied from the target may name the kinds of all of its layers, and a width alone."""
    head = feature_head("eagle3", model())
    heads.save_head(head, tmp_path, head.config.to_dict(), dtype=torch.float32)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "sliding_window": 8, **change}))
    if message is None:
        read = heads.load_eagle3(tmp_path, model())
        features = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
        args = torch.arange(5)[None], features, torch.arange(5)[None]
        assert torch.equal(read(*args), head(*args))
        return
    with pytest.raises(ValueError, match=message):
        heads.load_eagle3(tmp_path, model())
