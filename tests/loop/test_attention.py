"""Attention of grouped heads: what SDPA says of repeated keys, and only where a model takes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import model
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec_loop import attention
from specdec_loop.attention import forward


@pytest.mark.parametrize(("few", "share"), [(0, 9.0), (attention.FEW, 9.0), (0, 0.0)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 1), (8, 2), (3, 3)])
def test_grouped_heads_attend_as_if_keys_were_repeated(
    heads: int, groups: int, kind: torch.dtype, few: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "FEW", few)
    monkeypatch.setattr(attention, "MASK_SHARE", share)
    g = torch.Generator().manual_seed(heads)
    dtype = torch.float32 if kind == torch.bool else kind
    for batch, same_mask, nodes, keys in ((1, 1, 1, 7), (3, 3, 5, 40), (3, 1, 2, 9), (2, 2, 1, 3)):
        query = torch.randn(batch, nodes, heads, 16, generator=g).to(dtype).transpose(1, 2)
        buffers = torch.randn(2, batch, groups, keys + 9, 16, generator=g).to(dtype)
        key, value = buffers[:, :, :, :keys]
        seen = torch.rand(same_mask, 1, nodes, keys, generator=g) < 0.6
        seen[..., 0] = True  # a row that attends nothing means nothing
        mask = seen if kind == torch.bool else torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
        got, _ = attention.grouped_sdpa(None, query, key, value, mask, scaling=0.3)
        wide = [t.repeat_interleave(heads // groups, 1).double() for t in (key, value)]
        scores = (query.double() @ wide[0].mT * 0.3).masked_fill(~seen, -torch.inf)
        want = (scores.softmax(-1) @ wide[1]).transpose(1, 2)
        assert got.is_contiguous()
        near: dict[str, Any] = {"atol": 2e-2 if dtype == torch.bfloat16 else 1e-5, "rtol": 0}
        torch.testing.assert_close(got.double(), want, **near)
        if nodes == 1:  # without a mask it attends all keys
            got, _ = attention.grouped_sdpa(None, query, key, value, None, scaling=0.3)
            want = ((query.double() @ wide[0].mT * 0.3).softmax(-1) @ wide[1]).transpose(1, 2)
            torch.testing.assert_close(got.double(), want, **near)


def test_unusual_attention_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, mask = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.zeros(1, 1, 3, 5)
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    left: list[dict[str, Any]] = []

    def theirs(module: Any, *tensors: Any, **options: Any) -> Any:
        left.append(options)
        usual = {name: value for name, value in options.items() if name in ("dropout", "scaling")}
        return sdpa_attention_forward(module, *tensors, **usual)

    monkeypatch.setattr(attention, "sdpa_attention_forward", theirs)
    want, _ = sdpa_attention_forward(layer, query, key, key, mask, scaling=0.4)
    for options in ({}, {"output_attentions": False}, {"softcap": None}, {"dropout": 0.0}):
        got, _ = attention.grouped_sdpa(layer, query, key, key, mask, scaling=0.4, **options)
        assert torch.allclose(got, want, atol=1e-6) and not left, sorted(options)
    bias = torch.zeros(1, 4, 3, 5)
    for options in ({"softcap": 30.0}, {"position_bias": bias}, {"cache": ()}, {"output_attentions": True}):
        got, _ = attention.grouped_sdpa(layer, query, key, key, mask, scaling=0.4, **options)
        assert torch.allclose(got, want, atol=1e-6) and left.pop().keys() >= options.keys()
    attention.grouped_sdpa(layer, query, key, key, mask[:, :, :1], scaling=0.4)
    assert left, "a mask of one row for all nodes"


def test_a_forward_changes_nothing_but_how_masked_heads_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    network, eager = model(), model(attention="eager")
    monkeypatch.setattr(network, "forward", lambda *a, **k: calls.append(network.config._attn_implementation))
    monkeypatch.setattr(eager, "forward", lambda *a, **k: calls.append(eager.config._attn_implementation))
    tokens = torch.tensor([[1, 2]])
    for some in (network, eager):
        forward(some, tokens, {"attention_mask": None})
        forward(some, tokens[:, :1], {"attention_mask": None})
        forward(some, tokens, {"attention_mask": torch.zeros(1, 1, 2, 2)})
    assert calls == ["sdpa", *["specdec_grouped"] * 2, *["eager"] * 3]

    calls.clear()  # one that asks for its attention by name, and one whose parts have attention of their own
    of_parts = SimpleNamespace(_attn_implementation="sdpa", sub_configs={"vision": None}, get_text_config=None)
    of_parts.get_text_config = lambda decoder: of_parts
    for config in (network.config, of_parts):
        other = type("Other", (), {"_supports_attention_backend": config is of_parts})()
        other.config = config
        type(other).__call__ = lambda self, ids, **_: calls.append(self.config._attn_implementation)
        forward(other, tokens, {"attention_mask": torch.zeros(1, 1, 2, 2)})
    assert calls == ["sdpa", "sdpa"]

    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError

    monkeypatch.setattr(network, "forward", fail)
    with pytest.raises(ArithmeticError):
        forward(network, tokens, {"attention_mask": torch.zeros(1, 1, 2, 2)})
    assert network.config._attn_implementation == "sdpa"
