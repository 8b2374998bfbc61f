"""Advance recurrent states over the accepted tokens of a step, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._accepted import check_steps
from ..._check import LOGIT_DTYPES, Checker, fail
from ..._codes import Backend
from ..._op import Op, Shape
from . import reference

STATE_DTYPES = (torch.float32, torch.bfloat16)
MOST_KEYS = 256  # a column of the state stays in registers


def _shapes(*args: Any) -> tuple[Shape, ...]:
    return ((args[5].shape, torch.int32),)


op = Op(reference.advance_state, _shapes, results=("status",), mutates=("state",))


def advance_state(
    state: Tensor,
    keys: Tensor,
    values: Tensor,
    num_accepted: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    path: Tensor | None = None,
    slots: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Advance the recurrent state over the accepted tokens, for all layers, in place and in one launch.

    A step keeps the inputs of its tokens, not the state after each of them. For the root (node 0) and then the nodes
    n_1, n_2, ... of the accepted path, with S the state ``[d_k, d_v]`` of a head:

        ``S = exp(g) S``, then ``S = S + k u^T`` with ``u = beta (v - S^T k)``, or ``u = v`` where beta is None.

    Gated delta rule: g one number a head; KDA: one a key channel. Mamba2 with a state ``[head_dim, d_state]``:
    ``k = dt x, v = B, g = dt A``. Head h takes key head ``h // (heads // key_heads)``, and values likewise. The state
    is read once and written once; sums are float32, and a bfloat16 state is rounded once.

    Args:
        state: float32 or bfloat16 ``[layers, slots, heads, d_k, d_v]``, d_k <= 256; written. Dense but for the first
            two axes, as the inputs are.
        keys: ``[layers, batch, nodes, key_heads, d_k]``, float32, bfloat16 or float16; a chain's nodes are the root
            and its drafts.
        values: ``[layers, batch, nodes, value_heads, d_v]``, dtype of keys.
        num_accepted: int32 ``[batch]``, as `verify_chain` or `verify_tree` returns it; -1: the request took no part.
        log_decay: float32 ``[layers, batch, nodes, heads]`` or ``[..., heads, d_k]``: g; None: no decay.
        beta: float32 ``[layers, batch, nodes, heads]``; None: no delta rule.
        path: int32 or int64 ``[batch, max_depth + 1]`` of a tree, as `verify_tree` returns it; None: a chain.
        slots: int32 ``[batch]``: the slot of each request, all different; -1 leaves a request out. None: its row.
        out: preallocated status.
        backend: see `verify_chain`.

    Returns:
        status, int32 ``[batch]``: 32 where num_accepted or the slot is out of range, or the path does not rise; that
        request's state stays as it is.

    Raises:
        ValueError: wrong shapes, dtypes, strides or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import advance_state
        >>> state = torch.zeros(1, 1, 1, 1, 2)  # one layer, slot, head and key channel
        >>> keys = torch.ones(1, 1, 3, 1, 1)  # root and two drafts
        >>> values = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]).view(1, 1, 3, 1, 2)
        >>> advance_state(state, keys, values, torch.tensor([1], dtype=torch.int32)), state.flatten()
        (tensor([0], dtype=torch.int32), tensor([11., 22.]))
    """
    name = "advance_state"
    check = Checker.of(name, "state", state, "[layers, slots, heads, d_k, d_v]")
    check.tensor("state", state, STATE_DTYPES, ("layers", "slots", "heads", "d_k", "d_v"))
    layers, _, heads, d_k, d_v = state.shape
    if not (layers and heads and 1 <= d_k <= MOST_KEYS and d_v):
        fail(name, "state", f"of at least one layer, head and d_v, and d_k of 1 to {MOST_KEYS}", list(state.shape))
    check.tensor("keys", keys, LOGIT_DTYPES, (layers, "batch", "nodes", "key_heads", d_k))
    batch, nodes = keys.shape[1:3]
    if nodes == 0:
        fail(name, "keys", "of a root at least", list(keys.shape))
    check.tensor("values", values, (keys.dtype,), (layers, batch, nodes, "value_heads", d_v))
    for what, tensor in (("keys", keys), ("values", values)):
        if tensor.shape[3] == 0 or heads % tensor.shape[3]:
            fail(name, what, f"of heads that divide the state's {heads}", tensor.shape[3])
    at = (layers, batch, nodes, heads)
    if log_decay is not None:
        per_channel = isinstance(log_decay, Tensor) and log_decay.dim() == 5
        check.tensor("log_decay", log_decay, (torch.float32,), (*at, d_k) if per_channel else at)
    if beta is not None:
        check.tensor("beta", beta, (torch.float32,), at)
    for what, given in (("state", state), ("keys", keys), ("values", values), ("log_decay", log_decay), ("beta", beta)):
        if given is not None and not given[:1, :1].is_contiguous():
            fail(name, what, "dense but for its first two axes", f"strides {list(given.stride())}")
    check_steps(check, "state", state, num_accepted, path, slots, batch)
    status: Tensor = op(
        state, keys, values, log_decay, beta, num_accepted, path, slots,
        device=state.device, backend=backend, out=out,
    )  # fmt: skip
    return status
