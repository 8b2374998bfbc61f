"""advance_state beside one float64 recurrence a head, token by token, in states that hold other requests too."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from caches import counts, leaf_paths, padded, random_tree
from check import assert_no_worse
from torch import Tensor

from specdec_kernels import advance_state
from specdec_kernels.ops.advance_state import op
from specdec_kernels.ops.advance_state.reference import advance_state as spelled

LAYERS, NODES, BATCH, SLOTS = 2, 5, 4, 6
RULES = ("linear", "decay", "delta", "gated delta", "channel")  # the last is KDA


def inputs(rule: str, heads: tuple[int, int, int], d_k: int, d_v: int, dtype: torch.dtype) -> dict[str, Any]:
    """Random inputs of a step; keys of norm one, as the delta rule has them."""
    g = torch.Generator().manual_seed(d_k * d_v)
    at, (key_heads, value_heads, state_heads) = (LAYERS, BATCH, NODES), heads
    keys = torch.nn.functional.normalize(torch.randn(*at, key_heads, d_k, generator=g), dim=-1)
    made: dict[str, Any] = {
        "keys": keys.to(dtype),
        "values": torch.randn(*at, value_heads, d_v, generator=g).to(dtype),
        "log_decay": None,
        "beta": torch.rand(*at, state_heads, generator=g) if rule in ("delta", "gated delta", "channel") else None,
    }
    if rule in ("decay", "gated delta", "channel"):
        shape = (*at, state_heads, d_k) if rule == "channel" else (*at, state_heads)
        made["log_decay"] = -2 * torch.rand(shape, generator=g)
    return made


def stepped(state: Tensor, x: dict[str, Any], nodes: list[list[int]], slots: list[int]) -> Tensor:
    """The states in float64 after these nodes of each request, one outer product at a time."""
    want = state.double()
    heads = state.shape[2]
    for layer in range(state.shape[0]):
        for b, path in enumerate(nodes):
            for h in range(heads):
                s = want[layer, slots[b], h]
                for n in path:
                    k = x["keys"][layer, b, n, h * x["keys"].shape[3] // heads].double()
                    v = x["values"][layer, b, n, h * x["values"].shape[3] // heads].double()
                    if x["log_decay"] is not None:
                        s *= x["log_decay"][layer, b, n, h].double().exp().reshape(-1, 1)
                    if x["beta"] is not None:
                        v = x["beta"][layer, b, n, h].double() * (v - s.T @ k)
                    s += torch.outer(k, v)
    return want


def moved(x: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: None if t is None else t.to(device) for name, t in x.items()}


def test_the_root_and_the_accepted_drafts_enter_the_state(backend: str, device: str) -> None:
    state = torch.zeros(1, 2, 1, 1, 2, device=device)
    keys = torch.ones(1, 2, 3, 1, 1, device=device)
    values = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], device=device).expand(1, 2, -1, -1)[:, :, :, None]
    half = torch.full((1, 2, 3, 1), 0.5, device=device).log()
    given = (state, keys, values.contiguous(), counts([1, 0], device))
    assert advance_state(*given, log_decay=half).tolist() == [0, 0]
    assert state.flatten().tolist() == pytest.approx([10.5, 21.0, 1.0, 2.0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("heads", "d_k", "d_v"),
    [
        ((1, 2, 2), 16, 64),  # grouped keys; whole blocks
        ((2, 1, 2), 5, 70),  # grouped values, as Mamba2's B; odd sizes, a block and a part of one
        ((1, 1, 1), 200, 3),  # long keys
    ],
)
def test_chains_follow_the_recurrence(
    backend: str, device: str, rule: str, heads: tuple[int, int, int], d_k: int, d_v: int
) -> None:
    """A ragged batch with one request that takes no part, in slots of its own: 1e-5 of float64."""
    x = inputs(rule, heads, d_k, d_v, torch.float32)
    state = torch.randn(LAYERS, SLOTS, heads[2], d_k, d_v, generator=torch.Generator().manual_seed(1))
    accepted, slots = [2, 0, -1, NODES - 1], [4, 0, 3, 1]
    want = stepped(state, x, [list(range(n + 1)) for n in accepted], slots)
    ours = state.clone().to(device)
    status = advance_state(ours, num_accepted=counts(accepted, device), slots=counts(slots, device), **moved(x, device))
    assert status.tolist() == [0] * BATCH
    assert float((ours.cpu().double() - want).abs().max()) < 1e-5
    assert torch.equal(ours.cpu()[:, [2, 3, 5]], state[:, [2, 3, 5]])  # of nobody, or of who took no part


@pytest.mark.parametrize("rule", ["decay", "channel"])
def test_paths_of_trees(backend: str, device: str, rule: str) -> None:
    paths = (leaf_paths(random_tree(NODES, random.Random(3))) * BATCH)[:BATCH]
    x = inputs(rule, (1, 1, 2), 8, 9, torch.bfloat16)
    state = torch.randn(LAYERS, BATCH, 2, 8, 9, generator=torch.Generator().manual_seed(1))
    want = stepped(state, x, [[0, *path] for path in paths], list(range(BATCH)))
    for dtype in (torch.int32, torch.int64):
        ours = state.clone().to(device)
        path = padded(paths, NODES, dtype, device)
        lengths = counts([len(p) for p in paths], device)
        assert advance_state(ours, num_accepted=lengths, path=path, **moved(x, device)).tolist() == [0] * BATCH
        assert float((ours.cpu().double() - want).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", ["decay", "gated delta"])
def test_a_bfloat16_state_is_rounded_once(backend: str, device: str, rule: str, dtype: torch.dtype) -> None:
    x = inputs(rule, (1, 2, 2), 16, 40, dtype)
    state = torch.randn(LAYERS, BATCH, 2, 16, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    accepted = [NODES - 1] * BATCH
    want = stepped(state, x, [list(range(NODES))] * BATCH, list(range(BATCH)))
    ours, plain = state.clone().to(device), state.clone()
    advance_state(ours, num_accepted=counts(accepted, device), **moved(x, device))
    spelled(plain, x["keys"], x["values"], x["log_decay"], x["beta"], counts(accepted), None, None)
    error = (ours.cpu().double() - want).abs()
    assert bool((error <= want.abs() * 2**-8 + 1e-5).all())  # half a step of bfloat16: once
    assert_no_worse(ours.cpu(), plain, want)


def test_bad_counts_paths_and_slots_are_flagged_and_harm_nobody(backend: str, device: str) -> None:
    x = inputs("gated delta", (1, 1, 1), 4, 6, torch.float32)
    state = torch.randn(LAYERS, SLOTS, 1, 4, 6, generator=torch.Generator().manual_seed(1))
    slots, path = [0, 1, 2, 3], [[1, 2, 4, -1]] * BATCH
    want = stepped(state, x, [[0, 1, 2], [], [0], [0, 1, 2, 4]], slots)
    for count, slot, second in (
        (-2, 1, 2),
        (5, 1, 2),
        (2**31 - 1, 1, 2),
        (2, 6, 2),
        (2, -2, 2),
        (2, 1, 1),
        (2, 1, 5),
        (2, 1, -1),
        (4, 1, 2),  # over the path's end
    ):
        given = [row[:] for row in path]
        given[1][1] = second
        ours = state.clone().to(device)
        status = advance_state(
            ours,
            num_accepted=counts([2, count, 0, 3], device),
            path=torch.tensor(given, device=device),
            slots=counts([0, slot, 2, 3], device),
            **moved(x, device),
        )
        assert status.tolist() == [0, 32, 0, 0]
        assert float((ours.cpu().double() - want).abs().max()) < 1e-5
        assert torch.equal(ours.cpu()[:, [1, 4, 5]], state[:, [1, 4, 5]])
    left_out = advance_state(
        ours, num_accepted=counts([-1, 2, -1, -1], device), slots=counts([0, -1, 2, 3], device), **moved(x, device)
    )
    assert left_out.tolist() == [0] * BATCH and float((ours.cpu().double() - want).abs().max()) < 1e-5


def test_views_of_larger_buffers_and_empty_batches(backend: str, device: str) -> None:
    """What an engine passes: the first requests of buffers made for the largest batch."""
    x = moved(inputs("gated delta", (1, 1, 1), 4, 6, torch.float32), device)
    state = torch.randn(2 * LAYERS, SLOTS, 1, 4, 6, device=device)[::2]
    for batch in (0, 2):
        some = {name: t[:, :batch] for name, t in x.items()}
        want = stepped(state.cpu(), moved(some, "cpu"), [[0, 1]] * batch, list(range(batch)))
        advance_state(state, num_accepted=counts([1] * batch, device), **some)
        assert float((state.cpu().double() - want).abs().max()) < 1e-5


def test_opcheck_compile_and_out(backend: str, device: str) -> None:
    x = moved(inputs("gated delta", (1, 1, 1), 4, 6, torch.float32), device)
    state, accepted = torch.randn(LAYERS, BATCH, 1, 4, 6, device=device), counts([3, 0, -1, 1], device)
    ours = state.clone()
    out = torch.full_like(accepted, 99)
    assert advance_state(ours, num_accepted=accepted, out=out, **x) is out
    assert out.tolist() == [0] * BATCH
    if backend != "reference":
        given = (state.clone(), x["keys"], x["values"], x["log_decay"], x["beta"], accepted, None, None)
        torch.library.opcheck(op.overload(backend), given)
        torch.library.opcheck(op.overload(backend, out=True), (*given, torch.empty_like(accepted)))
        again = state.clone()
        step = torch.compile(advance_state, fullgraph=True, backend="aot_eager")
        assert step(again, num_accepted=accepted, **x).tolist() == [0] * BATCH
        assert torch.equal(again, ours)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": [1.0]}, r"state must be a tensor \[layers, slots, heads, d_k, d_v\], got list"),
        ({"state": torch.zeros(2, 4, 1, 4, 6).half()}, "state must be float32 or bfloat16, got float16"),
        ({"state": torch.zeros(2, 4, 1, 257, 6)}, "state must be of at least one layer, head and d_v, and d_k of 1"),
        ({"state": torch.zeros(2, 3, 1, 4, 6)}, "slots must be given where the state has fewer slots than requests"),
        ({"state": torch.zeros(2, 4, 1, 6, 4).mT}, "state must be dense but for its first two axes"),
        (
            {"state": torch.zeros(2, 1, 1, 4, 6).expand(2, 4, 1, 4, 6)},
            "state must be of slots with memory of their own",
        ),
        ({"keys": torch.zeros(2, 4, 5, 2, 4)}, "keys must be of heads that divide the state's 1, got 2"),
        ({"keys": torch.zeros(2, 4, 0, 1, 4)}, "keys must be of a root at least"),
        ({"values": torch.zeros(2, 4, 5, 1, 6).half()}, "values must be float32, got float16"),
        ({"log_decay": torch.zeros(2, 4, 5, 1, 6)}, r"log_decay must be \[2, 4, 5, 1, 4\]"),
        ({"beta": torch.zeros(2, 4, 5)}, r"beta must be \[2, 4, 5, 1\]"),
        ({"num_accepted": torch.zeros(4)}, "num_accepted must be int32, got float32"),
        ({"path": torch.zeros(3, 2).long()}, "path must be"),
        ({"slots": torch.zeros(4).long()}, "slots must be int32, got int64"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    x = inputs("gated delta", (1, 1, 1), 4, 6, torch.float32)
    arguments = {"state": torch.zeros(2, 4, 1, 4, 6), "num_accepted": counts([0] * 4), **x, **change}
    with pytest.raises(ValueError, match="advance_state: " + message):
        advance_state(**arguments)


@pytest.mark.parametrize("rule", ["decay", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_agrees_with_the_reference(isa: str, rule: str, dtype: torch.dtype) -> None:
    x = inputs(rule, (2, 2, 4), 24, 70, torch.float16)  # columns: a whole block, and a part of one
    state = torch.randn(LAYERS, BATCH, 4, 24, 70).to(dtype)
    want, accepted = state.clone(), counts([0, 4, -1, 2], "cpu")
    advance_state(state, **x, num_accepted=accepted, backend="cpu")
    advance_state(want, **x, num_accepted=accepted, backend="reference")
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # a bfloat16 may round the other way
    torch.testing.assert_close(state, want, rtol=tolerance, atol=tolerance)
