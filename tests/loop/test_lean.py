"""A Llama run without its wrappers gives the model's own logits, wherever the nodes of a batch hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_kernels import Sampling
from specdec_loop import DraftModel, TreeCache, generate
from specdec_loop.lean import WIDEST, LeanLlama

SIZES = {"vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "wide heads": {"head_dim": 16, "num_key_value_heads": 1},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "scaled angles": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
}


def _model(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 64, **more})).eval()
    for p in model.parameters():  # norms of ones and biases of zeros would hide a mix-up
        p.data += 0.1 * torch.randn_like(p)
    return model


def _walk(model: LlamaForCausalLM, run: Any, batch: int) -> list[Tensor]:
    """Logits of a prompt, of lone tokens, a tree, and chains behind texts of different lengths."""
    cache = TreeCache(model.config, batch=batch, capacity=40, dtype=model.dtype, device=model.device)
    ids = torch.randint(SIZES["vocab_size"], (batch, 20), generator=torch.Generator().manual_seed(3))
    out = [run(ids[:, :6], cache.chain_inputs(6), 0)]
    cache.commit(5)
    out.append(run(ids[:, 6:7], cache.chain_inputs(1), 1))
    out.append(run(ids[:, 7:8], cache.chain_inputs(1), 0))
    cache.crop(-1)
    parents = torch.tensor([[-1, 0, 0, 1]]).repeat(batch, 1)
    cache.commit(0)
    out.append(run(ids[:, 8:12], cache.tree_inputs(parents), 2))
    cache.commit(torch.arange(batch, dtype=torch.int32) % 2)
    out.append(run(ids[:, 12:15], cache.chain_inputs(3), torch.tensor([0, 2])))
    return out


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_models(name: str, batch: int, dtype: torch.dtype) -> None:
    model = _model(**MODELS[name]).to(dtype)
    assert LeanLlama.suits(model)
    lean = LeanLlama(model)
    lean.reach(40)
    want = _walk(model, lambda ids, inputs, keep: model(ids, **inputs, logits_to_keep=keep).logits, batch)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for have, logits in zip(_walk(model, lean, batch), want, strict=True):
        torch.testing.assert_close(have, logits, **close)


def test_without_reach_all_positions_are_ready() -> None:
    model = _model()
    with torch.no_grad():
        for have, want in zip(_walk(model, LeanLlama(model), 1), _walk(model, _reached(model), 1), strict=True):
            assert torch.equal(have, want)


def _reached(model: LlamaForCausalLM) -> LeanLlama:
    lean = LeanLlama(model)
    lean.reach(20)
    return lean


class Other(LlamaForCausalLM):  # type: ignore[misc] # transformers has no types
    """Its forward may be anything."""


@pytest.mark.parametrize(
    "model",
    [
        _model().train(),
        _model(hidden_size=WIDEST + 32, num_hidden_layers=1),
        _model(hidden_act="gelu"),
        _model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        _model(attn_implementation="eager"),
        Other(LlamaConfig(**SIZES)).eval(),
        object(),
    ],
    ids=["training", "wide", "gelu", "dynamic angles", "eager", "subclass", "no model"],
)
def test_other_models_are_left_to_transformers(model: Any) -> None:
    assert not LeanLlama.suits(model)


def test_drafts_do_not_depend_on_who_runs_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = _model(), _model(num_hidden_layers=1)
    prompts, sampling = [[5, 6, 7], [8], [9, 1]], Sampling.full(3, temperature=0.7)

    def run() -> Any:
        return generate(target, DraftModel(draft), prompts, sampling=sampling, max_new_tokens=24, stop=())

    lean = run()
    monkeypatch.setattr(LeanLlama, "suits", staticmethod(lambda model: False))
    wrapped = run()
    assert lean.tokens == wrapped.tokens
    assert [r.accepted for r in lean.statistics] == [r.accepted for r in wrapped.statistics]
