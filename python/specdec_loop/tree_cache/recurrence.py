"""Recurrences along the paths of trees, and how transformers' layers are led to them.

A layer of transformers calls its recurrence and its short convolution as functions of its modeling file. `lead` wraps
these: a state or an input that a layer of a `TreeCache` gave out carries that layer, and the call goes to it. All other
calls go on as before.

Mamba's scan alone is given nothing of the kind. Its gate `z` is the other half of what the layer's convolution was
given last (`begin_scan`), and lies in the same storage.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OWNER = "_specdec_layer"  # attribute of tensors that a layer of a TreeCache gave out
METHODS = {  # function of a modeling file: the method of `StateLayer` in its place, and the argument that carries it
    "causal_conv1d_fn": ("convolve", "hidden_states"),
    "torch_chunk_gated_delta_rule": ("delta_rule", "initial_state"),
    "torch_recurrent_gated_delta_rule": ("delta_rule", "initial_state"),
    "chunk_kimi_delta_attention": ("delta_rule", "initial_state"),
    "recurrent_kimi_delta_attention": ("delta_rule", "initial_state"),
    "mamba2_chunk_scan": ("scan", "initial_states"),
    "mamba2_selective_state_update": ("scan_one", "state"),
    "mamba_selective_scan": ("select", "z"),
    "mamba_selective_state_update": ("select_one", "state"),
}
_last = threading.local()  # layer and inputs of the convolution that ran last


def owned(x: Tensor, layer: Any) -> Tensor:
    """A view that carries its layer."""
    view = x.view_as(x)
    setattr(view, OWNER, layer)
    return view


def begin_scan(layer: Any, inputs: Tensor) -> None:
    """Note whose scan follows. The inputs are held until then, so that nothing else lies where they do."""
    _last.convolution = layer, inputs


def _scanning(gate: Tensor | None) -> Any:
    """The layer of a scan with this gate; None: not of a `TreeCache`."""
    layer, inputs = getattr(_last, "convolution", (None, torch.empty(0)))
    if layer is None or gate is None or inputs.untyped_storage().data_ptr() != gate.untyped_storage().data_ptr():
        return None
    del _last.convolution
    return layer


def modeling_file(config: Any) -> Any:
    """The module of transformers that has a configuration's layers."""
    return importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))


def lead(module: Any) -> None:
    """Wrap the functions of a modeling file, once."""
    for name, (method, argument) in METHODS.items():
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, OWNER):
            setattr(module, name, _led(original, method, argument))


def _led(original: Callable[..., Any], method: str, argument: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def led(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        carrier = given.get(argument)
        layer = _scanning(carrier) if method == "select" else getattr(carrier, OWNER, None)
        if layer is None:
            return original(*args, **kwargs)
        given |= given.pop("kwargs", {})
        return getattr(layer, method)(original, **given)

    setattr(led, OWNER, True)
    return led


def path_weights(log_decay: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """What is left, at a node, of the state before the tree and of what each node wrote.

    Args:
        log_decay: float32 ``[batch, nodes, heads, 1 or d_k]``.
        seen: bool ``[batch, nodes, nodes]``: ancestors, and itself.

    Returns:
        With G the sum of the decays down to a node: ``exp(G_i)``, ``[batch, heads, nodes, 1 or d_k]``, and
        ``exp(G_i - G_j)``, ``[batch, heads, nodes, nodes, 1 or d_k]``, 0 where j is not seen.
    """
    total = (seen.float() @ log_decay.flatten(2)).view_as(log_decay).transpose(1, 2)
    between = total[..., :, None, :] - total[..., None, :, :]
    return total.exp(), between.masked_fill(~seen[:, None, :, :, None], float("-inf")).exp()


def _products(x: Tensor, y: Tensor, between: Tensor) -> Tensor:
    """``w_ij (x_i . y_j)``, the weights inside the sum where each number of a key has its own."""
    if between.shape[-1] == 1:
        return (x @ y.mT) * between[..., 0]
    products: Tensor = torch.einsum("bhic,bhjc,bhijc->bhij", x, y, between)
    return products


def delta_along_paths(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor, seen: Tensor
) -> Tensor:
    """``S_i^T q_i`` of the gated delta rule, S_i being the state after node i: that of its parent, advanced by i.

    With w_ij = exp(G_i - G_j), ``S_i = exp(G_i) S + sum_j w_ij k_j u_j^T`` over the nodes j that i sees, and
    ``u_i = beta_i (v_i - exp(G_i) S^T k_i - sum_{j != i} w_ij (k_i . k_j) u_j)``: a triangular system, for parents come
    before their children. In Kimi's rule G has a number for each of a key's.

    Args:
        state: float32 ``[batch, heads, d_k, d_v]`` before the tree.
        queries: float32 ``[batch, last nodes, heads, d_k]``.
        keys: float32 ``[batch, nodes, heads, d_k]``.
        values: float32 ``[batch, nodes, heads, d_v]``.
        log_decay: float32 ``[batch, nodes, heads]``, or ``[batch, nodes, heads, d_k]``.
        beta: float32 ``[batch, nodes, heads]``.
        seen: bool ``[batch, nodes, nodes]``: ancestors, and itself.

    Returns:
        ``[batch, last nodes, heads, d_v]``.
    """
    q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
    kept, between = path_weights(log_decay if log_decay.dim() == 4 else log_decay[..., None], seen)
    rate = beta.transpose(1, 2)[..., None]
    system, given = rate * _products(k, k, between), rate * (v - (kept * k) @ state)
    u: Tensor = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    new = -q.shape[2]
    out: Tensor = (kept[:, :, new:] * q) @ state + _products(q, k, between[:, :, new:]) @ u
    return out.transpose(1, 2)


def sums_along_paths(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, seen: Tensor
) -> Tensor:
    """``S_i q_i`` without the delta rule, as Mamba2 reads its state: ``S_i = exp(G_i) S + sum_j w_ij k_j v_j^T``.

    Args:
        state: float32 ``[batch, heads, d_k, d_v]`` before the tree.
        queries: float32 ``[batch, last nodes, heads, d_v]``.
        keys: float32 ``[batch, nodes, heads, d_k]``.
        values: float32 ``[batch, nodes, heads, d_v]``.
        log_decay: float32 ``[batch, nodes, heads]``.
        seen: bool ``[batch, nodes, nodes]``: ancestors, and itself.

    Returns:
        ``[batch, last nodes, heads, d_k]``.
    """
    q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
    kept, between = path_weights(log_decay[..., None], seen)
    new = -q.shape[2]
    out = kept[:, :, new:] * (q @ state.mT) + _products(q, v, between[:, :, new:]) @ k
    return out.transpose(1, 2)


def select_along_paths(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, parents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``S_i^T q_i`` of Mamba, whose decay has a number for each channel and key: token by token, as transformers does.

    Args:
        state: float32 ``[batch, channels, d_k, 1]`` before the nodes.
        queries: float32 ``[batch, last nodes, d_k]``.
        keys: float32 ``[batch, nodes, d_k]``.
        values: float32 ``[batch, nodes, channels]``.
        log_decay: float32 ``[batch, nodes, channels, d_k]``.
        parents: int64 ``[batch, nodes]``, -1: the state; None: a chain, of whose nodes all are new.

    Returns:
        ``[batch, last nodes, channels]``, and the state after the last node.
    """
    batch, nodes = keys.shape[:2]
    after, outputs, new = state[..., 0], [], nodes - queries.shape[1]
    request = torch.arange(batch, device=keys.device)
    known = after[:, None] if parents is None else after[:, None].repeat(1, 1 + nodes, 1, 1)  # state of each tree node
    for i in range(nodes):
        parent = after if parents is None else known[request, parents[:, i] + 1]
        after = torch.addcmul(values[:, i, :, None] * keys[:, i, None], log_decay[:, i].exp(), parent)
        if parents is not None:
            known[:, i + 1] = after
        if i >= new:
            outputs.append((after @ queries[:, i - new, :, None])[..., 0])
    return torch.stack(outputs, 1), after[..., None]
