"""advance_state beside the recurrences of transformers' own layers, with their shapes and groups."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import advance_state

qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")

BATCH, NODES = 2, 4
ACCEPTED = torch.tensor([2, 0], dtype=torch.int32)


def test_the_gated_delta_rule_is_that_of_qwen3_next() -> None:
    """Two value heads a key head; the state after each request's accepted tokens."""
    state, g = torch.randn(BATCH, 4, 16, 8), -torch.rand(BATCH, NODES, 4)
    keys = torch.nn.functional.normalize(torch.randn(BATCH, NODES, 2, 16), dim=-1)
    values, beta = torch.randn(BATCH, NODES, 4, 8), torch.rand(BATCH, NODES, 4)
    want = []
    for b, n in enumerate(ACCEPTED.tolist()):
        q, k, v, decay, rate = (x[b : b + 1, : n + 1] for x in (keys, keys, values, g, beta))
        if keys.shape[2] != values.shape[2]:  # versions differ in who repeats the heads
            q, k = (x.repeat_interleave(2, 2) for x in (q, k))
        rule = qwen3_next.torch_recurrent_gated_delta_rule
        want.append(rule(q, k, v, decay, rate, initial_state=state[b : b + 1], output_final_state=True)[1])
    ours = state[None].clone()
    advance_state(ours, keys[None], values[None], ACCEPTED, log_decay=g[None], beta=beta[None])
    torch.testing.assert_close(ours[0], torch.cat(want), atol=1e-5, rtol=0)


def test_the_recurrence_of_mamba2_with_its_own_state() -> None:
    """State [head_dim, d_state]: dt x for keys, B of a group of heads for values."""
    state, x, dt = torch.randn(BATCH, 4, 8, 16), torch.randn(BATCH, NODES, 4, 8), torch.rand(BATCH, NODES, 4)
    b_rows, a = torch.randn(BATCH, NODES, 2, 16), -torch.rand(4)
    ours = state[None].clone()
    advance_state(ours, (dt[..., None] * x)[None], b_rows[None], ACCEPTED, log_decay=(dt * a)[None])
    for b, n in enumerate(ACCEPTED.tolist()):
        want = state[b : b + 1]
        for t in range(n + 1):  # the layer's formula: S = exp(dt A) S + (dt B) x
            rows = b_rows[b, t].repeat_interleave(2, 0)[:, None]
            want = want * (dt[b, t] * a).exp()[:, None, None] + (dt[b, t, :, None, None] * rows) * x[b, t, :, :, None]
        torch.testing.assert_close(ours[0, b : b + 1], want, atol=1e-5, rtol=0)
    if step := getattr(mamba2, "mamba2_selective_state_update", None):  # a function of its own since 5.23
        one = state.clone()
        spread = a[:, None, None].expand(-1, 8, 16)
        step(one, x[:, 0], dt[:, 0, :, None].expand(-1, -1, 8), spread, b_rows[:, 0], b_rows[:, 0])
        torch.testing.assert_close(ours[0, 1], one[1], atol=1e-5, rtol=0)
