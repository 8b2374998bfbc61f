"""Kernels run on the device of their tensors, whichever is current: two GPUs that are none (fake_gpu.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gpu import State, fake_gpu
from op_calls import CALLS
from other_device import BACKENDS, agrees

pytest.importorskip("triton", reason="its launches are watched")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_devices.py is for real GPUs")


@pytest.fixture
def gpus(cuda_host: None) -> Iterator[State]:
    with fake_gpu() as state:
        yield state


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("op", CALLS)
def test_an_op_runs_where_its_tensors_are(op: str, kernels: str, gpus: State) -> None:
    """The fake fails where a kernel is launched on another device than that of its tensors."""
    assert agrees(op, kernels, "cuda:1")
    assert gpus.current == 0
    if kernels == "triton":
        assert gpus.launches
        assert {device for _, device in gpus.launches} == {1}


def test_the_fake_sees_a_launch_on_the_wrong_device(gpus: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match=r"launched on cuda:0, its tensors are on \{1\}"):
        agrees("sample", "triton", "cuda:1")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x + torch.ones(3), "same device"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: torch.cuda.set_sync_debug_mode("error") or x.sum().item(), "synchronizing"),
    ],
    ids=["two devices", "numpy", "a wait"],
)
def test_the_fake_fails_where_a_gpu_does(gpus: State, call: Any, message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        call(torch.ones(3, device="cuda"))


def test_the_fake_replays_a_graph(gpus: State) -> None:
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    x.fill_(5.0)
    graph.replay()
    assert y.tolist() == [10.0, 10.0, 10.0]
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
