"""Linear layers for the few rows of a decoding step: BLAS libraries are made for many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from specdec_kernels import available_backends

# Up to so many rows `specdec_kernels::linear.cpu` is the faster one. 2 cores with AVX-512, a weight [1536, 256] that
# comes from memory, 1 / 4 / 16 / 64 / 128 rows: float32 8.1 / 7.8 / 2.6 / 1.6 / 1.6 times as fast as torch, which asks
# MKL; bfloat16 4.2 / 2.8 / 1.1 / .68 / .60 times, where it asks oneDNN (`python -m bench linear`, AMD EPYC model 17).
ROWS = {torch.float32: 128, torch.bfloat16: 12, torch.float16: 12}
UNIT = 16  # inputs are a multiple of it
AMX = 3  # cpu_isa() of a CPU that multiplies bfloat16 by itself


@contextmanager
def small_batch_linear(*networks: Any) -> Iterator[None]:
    """Meanwhile the `nn.Linear` layers of these networks multiply few rows by a kernel of this package.

    It reads the weights once for all rows, as fast as memory gives them. Up to 15 rows a row's sum, which is float32,
    is the same whatever their number. It serves CPUs; networks elsewhere, compiled ones, other kinds of layers, layers
    whose `forward` somebody has replaced, and calls under autograd are left as they are. `generate` does this.

    Args:
        networks: transformers models, heads, ..; what is no `nn.Module` is left as it is, too.

    Example:
        >>> import torch
        >>> from specdec_loop.linear import small_batch_linear
        >>> layer, x = torch.nn.Linear(32, 48), torch.randn(1, 5, 32)
        >>> with torch.no_grad(), small_batch_linear(layer):
        ...     five, one = layer(x), layer(x[:, :1])
        >>> torch.equal(five[:, :1], one)
        True
    """
    replaced: list[nn.Linear] = []
    try:
        for network in networks if available_backends("cpu")["cpu"] is None else ():
            for layer in _layers(network):
                vars(layer)["forward"] = _forward(layer)
                replaced.append(layer)
        yield
    finally:
        for layer in replaced:
            vars(layer).pop("forward", None)  # a call in another thread may have replaced the same one


def _layers(network: Any) -> Iterator[nn.Linear]:
    """Those that are to be replaced."""
    if not isinstance(network, nn.Module) or any(map(_is_compiled, network.modules())):
        return
    has_amx = torch.ops.specdec_kernels.cpu_isa() == AMX
    for layer in network.modules():
        if type(layer) is not nn.Linear or "forward" in vars(layer):
            continue
        parts = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
        dtype = parts[0].dtype
        is_plain = all(type(p.data) is Tensor and p.dtype == dtype and p.is_contiguous() for p in parts)
        is_served = dtype in ROWS and not (has_amx and dtype == torch.bfloat16) and layer.in_features % UNIT == 0
        if is_plain and is_served and parts[0].device.type == "cpu":
            yield layer


def _is_compiled(network: nn.Module) -> bool:
    return hasattr(network, "_orig_mod") or network._compiled_call_impl is not None


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Forward that replaces the layer's own."""
    weight, bias, dtype = layer.weight, layer.bias, layer.weight.dtype
    most, multiply = ROWS[dtype] * layer.in_features, torch.ops.specdec_kernels.linear.cpu

    def forward(x: Tensor) -> Tensor:
        if x.numel() <= most and x.dtype is dtype and x.is_contiguous() and not torch.is_grad_enabled():
            out: Tensor = multiply(x, weight, bias)
            return out
        return linear(x, weight, bias)

    return forward
