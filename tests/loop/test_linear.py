"""Layers of few rows: replaced where the kernel serves them, for a while, and by nothing but a faster same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_models import feature_head
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_kernels import Sampling, _native
from specdec_loop import DraftModel, HeadChain, SuffixOr, generate
from specdec_loop.drafters import Drafter
from specdec_loop.linear import AMX, ROWS, small_batch_linear

pytestmark = pytest.mark.skipif(_native.cpu_reason() is not None, reason=str(_native.cpu_reason()))


class _Count(TorchDispatchMode):
    """Counts calls of the kernel, and of the matrix products of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.torch = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernel += func is torch.ops.specdec_kernels.linear.cpu
        self.torch += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def _calls(run: Callable[[], Any]) -> tuple[int, int]:
    with torch.no_grad(), _Count() as count:
        run()
    return count.kernel, count.torch


def _model(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(7)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes, **more)).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", ROWS, ids=str)
def test_as_many_rows_as_are_faster(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and torch.ops.specdec_kernels.cpu_isa() == AMX:
        pytest.skip("this machine multiplies bfloat16 by itself")
    layer = nn.Linear(32, 20).to(dtype)
    with small_batch_linear(layer):
        for rows, kernel in ((1, 1), (ROWS[dtype], 1), (ROWS[dtype] + 1, 0)):
            assert _calls(lambda rows=rows: layer(torch.ones(rows, 32, dtype=dtype))) == (kernel, 1 - kernel)
        x = torch.randn(2, 3, 32).to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert _calls(lambda: layer(torch.ones(1, 32, dtype=dtype))) == (0, 1)


class _Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def _hooked() -> nn.Module:
    layer = nn.Linear(32, 8)
    layer.forward = lambda x: x  # type: ignore[method-assign] # as device maps and quantisers do
    return layer


@pytest.mark.parametrize(
    "network",
    [
        _Twice(32, 8),
        _hooked(),
        nn.Linear(24, 8),  # inputs that are not whole vectors
        nn.Linear(32, 8, dtype=torch.float64),
        nn.Linear(32, 8, device="meta"),
        nn.Linear(32, 8).requires_grad_(False).share_memory().apply(lambda m: m.compile()),
        "no network",
    ],
    ids=["subclass", "replaced", "odd inputs", "double", "elsewhere", "compiled", "no module"],
)
def test_what_is_left_as_it_is(network: Any) -> None:
    before = dict(vars(network)) if isinstance(network, nn.Module) else {}
    with small_batch_linear(network):
        assert not isinstance(network, nn.Module) or vars(network) == before


def test_calls_that_are_left_to_torch() -> None:
    layer = nn.Linear(32, 20)
    with small_batch_linear(layer):
        assert _calls(lambda: layer(torch.ones(2, 64)[:, ::2])) == (0, 1)
        out = layer(torch.ones(2, 32))  # under autograd
    assert out.requires_grad


def test_layers_come_back_whatever_happens() -> None:
    layer, x = nn.Linear(32, 20), torch.ones(1, 32)
    with pytest.raises(KeyError), small_batch_linear(layer):
        raise KeyError
    assert "forward" not in vars(layer)
    with small_batch_linear(layer):
        with small_batch_linear(nn.Sequential(layer)):
            pass
        assert _calls(lambda: layer(x)) == (1, 0)  # the inner one has not taken it away
    assert "forward" not in vars(layer)


def test_a_layer_that_two_threads_replaced_at_once_comes_back() -> None:
    layer = nn.Linear(32, 8)
    with small_batch_linear(layer):
        del layer.forward  # the other one is done first
    assert "forward" not in vars(layer)


def test_a_network_may_be_cast_between_two_calls() -> None:
    layer = nn.Linear(32, 20)
    for dtype in (torch.float32, torch.float16, torch.float32):
        layer.to(dtype)
        with small_batch_linear(layer), torch.no_grad():
            assert layer(torch.ones(1, 32, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("name", ["plain", "draft model", "head", "copies"])
def test_the_loop_runs_all_its_networks_so(name: str) -> None:
    target = _model()
    drafters: dict[str, Callable[[], Drafter | None]] = {
        "plain": lambda: None,
        "draft model": lambda: DraftModel(_model()),
        "head": lambda: HeadChain(feature_head("mtp", target)),
        "copies": lambda: SuffixOr(DraftModel(_model())),
    }
    sampling = Sampling.full(1, temperature=1.0)
    kernel, torch_own = _calls(
        lambda: generate(target, drafters[name](), [[5, 6, 7]], sampling=sampling, max_new_tokens=9, stop=())
    )
    assert kernel > 9
    assert torch_own == 0
    assert not any("forward" in vars(module) for module in target.modules())


def test_a_token_of_a_chain_reads_the_same_bits_as_alone() -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    x = torch.randn(1, 9, 32)
    with torch.no_grad(), small_batch_linear(network):
        together = network(x)
        assert all(torch.equal(network(x[:, i : i + 1]), together[:, i : i + 1]) for i in range(9))
