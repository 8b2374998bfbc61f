"""P-EAGLE heads as they are published, held against the package that publishes them, and the drafter of theirs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_texts import assert_texts, decode
from head_models import feature_head
from models import VOCAB, model
from safetensors.torch import load_file, save_file
from speculators_package import draft_head
from torch import Tensor

from specdec_loop import heads
from specdec_loop.drafters import ParallelChain, SuffixOr

CHOSEN, MASK, DEPTHS = [i for i in range(VOCAB) if i % 3], 5, 4
PEAGLE: dict[str, dict[str, Any]] = {
    "Llama's layer": {},
    "four of Qwen3's layers": {"layers": "qwen3", "num_hidden_layers": 4},
    "norms": {"norm_before_fc": True, "norm_before_residual": True},
    "norms of 3.1, whole vocabulary": {"fc_norm": True, "norm_output": True, "draft_vocab_size": VOCAB},
}


def reference_of(case: str) -> Any:
    levels = {"eagle_aux_hidden_state_layer_ids": [0, 1], "draft_vocab_size": len(CHOSEN), "mask_token_id": MASK}
    return draft_head("PEagle", CHOSEN, **{**levels, **PEAGLE[case]})


def flat(folder: Path) -> Path:
    """The same head as vLLM reads it: one flat configuration."""
    fields = json.loads((folder / "config.json").read_text())
    whole = {**fields.pop("transformer_layer_config"), **fields, "model_type": "llama"}
    del whole["speculators_model_type"], whole["speculators_config"], whole["auto_map"]
    whole["ptd_token_id"] = whole.pop("mask_token_id")
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def every_place(reference: Any, hidden: Tensor, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The package's logits ``[place, depth, vocab]``, which it makes in training for a sample of them."""
    length, said = ids.shape[1], []
    anchors, depths = (x.flatten() for x in torch.meshgrid(torch.arange(length), torch.arange(DEPTHS), indexing="ij"))
    core = importlib.import_module("speculators.models.peagle.core")
    fits = anchors + depths < length
    order = depths[fits].argsort(stable=True)
    anchors, depths = anchors[fits][order], depths[fits][order]
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, depths))
    hook = reference.lm_head.register_forward_hook(lambda module, given, out: said.append(out))
    loss = core.resolve_loss_config("kl_div", "eager")  # the other one is a kernel for GPUs
    given: dict[str, Any] = {"verifier_last_hidden_states": torch.randn(1, length, 32), "loss_config": loss}
    reference(hidden, ids, torch.zeros(1, length).long(), num_depths=DEPTHS, **given)
    hook.remove()
    logits = torch.full((length, DEPTHS, said[0].shape[-1]), float("nan"))
    logits[anchors, depths] = said[0][0]
    return logits[: length - DEPTHS + 1]


@pytest.mark.parametrize("case", PEAGLE)
def test_peagle_heads_are_those_of_speculators(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    reference = reference_of(case)
    reference.save_pretrained(tmp_path)
    hidden, ids = torch.randn(1, 9, 64), torch.randint(VOCAB, (1, 9))
    want = every_place(reference, hidden, ids, monkeypatch)
    for lay_out in (Path, flat):
        head = heads.load_peagle(lay_out(tmp_path), model())
        assert head.mask_token_id == MASK
        for place, rows in enumerate(want):
            is_mask = torch.arange(place + DEPTHS)[None] > place
            features = head.fuse_masked(hidden[:, : place + DEPTHS], is_mask)
            tokens = ids[:, : place + DEPTHS].masked_fill(is_mask, MASK)
            out = head(tokens, features, torch.arange(place + DEPTHS)[None])
            assert torch.allclose(head.logits(out[0, place:]), rows, atol=1e-4), f"place {place}"
    assert_texts(ParallelChain(head), SuffixOr(ParallelChain(head)))


@pytest.mark.parametrize("length", [1, 4])
def test_one_forward_drafts_what_the_whole_text_says(length: int) -> None:
    """Also where requests bring different numbers of new pairs."""
    head, compared = feature_head("peagle", model()), []
    drafter, forwards = ParallelChain(head), []
    block, run = drafter._block, drafter._run

    def checked(sequences: Any, length: int) -> Tensor:
        before = len(forwards)
        logits = block(sequences, length)
        assert len(forwards) == before + 1
        for b, n in enumerate(sequences.lengths.tolist()):
            if sequences.is_finished[b]:
                continue
            row = sequences.tokens[b : b + 1, :n]
            states = model()(row[:, :-1], output_hidden_states=True).hidden_states
            hidden = torch.cat([states[level] for level in drafter.features], -1)
            is_mask = torch.arange(n + length - 2)[None] >= n - 1
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, length - 1))
            tokens = torch.nn.functional.pad(row[:, 1:], (0, length - 1), value=head.mask_token_id)
            out = head(tokens, head.fuse_masked(hidden, is_mask), torch.arange(n + length - 2)[None])
            assert torch.allclose(logits[b], head.logits(out[0, -length:]), atol=1e-4), f"request {b} of {n} tokens"
            compared.append(n)
        return logits

    drafter._block = checked  # type: ignore[method-assign]
    drafter._run = lambda *args, **more: forwards.append(1) or run(*args, **more)  # type: ignore[method-assign,func-returns-value]
    decode(model(), drafter, "match", 7, draft_length=length)
    assert len(compared) > 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": None}, "must have mask_token_id or pard_token or ptd_token_id, got none"),
        ({"speculators_model_type": "eagle3"}, "must be peagle, got eagle3"),
        ({"eagle_aux_hidden_state_layer_ids": [0]}, r"mask_hidden must be \[1, 1, 32\], got \[1, 1, 64\]"),
    ],
)
def test_a_peagle_file_that_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    reference_of("Llama's layer").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(ValueError, match=message):
        heads.load_peagle(tmp_path, model())


def test_a_peagle_file_without_its_mask_is_named(tmp_path: Path) -> None:
    reference_of("Llama's layer").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["mask_hidden"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: \['mask_hidden'\]"):
        heads.load_peagle(tmp_path, model())
