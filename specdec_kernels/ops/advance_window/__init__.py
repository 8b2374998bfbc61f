"""Advance the windows of short convolutions over the accepted tokens of a step, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._accepted import check_steps
from ..._check import LOGIT_DTYPES, Checker, fail
from ..._codes import Backend
from ..._op import Op, Shape
from . import reference

MOST_WIDTH = 64


def _shapes(*args: Any) -> tuple[Shape, ...]:
    return ((args[2].shape, torch.int32),)


op = Op(reference.advance_window, _shapes, results=("status",), mutates=("window",))


def advance_window(
    window: Tensor,
    inputs: Tensor,
    num_accepted: Tensor,
    *,
    path: Tensor | None = None,
    slots: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Advance the windows of short convolutions over the accepted tokens, for all layers, in place and in one launch.

    A causal convolution of kernel size n reads the last n - 1 inputs before a token: its window, oldest first. The
    inputs of the root and of the accepted nodes are appended, and as many fall out in front. Nothing is computed, so
    the result is exact.

    Args:
        window: float32, bfloat16 or float16 ``[layers, slots, channels, width]``, any strides, width <= 64; written.
        inputs: ``[layers, batch, nodes, channels]``, dtype of window, any strides; a chain's nodes are the root and
            its drafts.
        num_accepted: int32 ``[batch]``, as `verify_chain` or `verify_tree` returns it; -1: the request took no part.
        path: int32 or int64 ``[batch, max_depth + 1]`` of a tree, as `verify_tree` returns it; None: a chain.
        slots: int32 ``[batch]``: the slot of each request, all different; -1 leaves a request out. None: its row.
        out: preallocated status.
        backend: see `verify_chain`.

    Returns:
        status, int32 ``[batch]``: 32 where num_accepted or the slot is out of range, or the path does not rise; that
        request's window stays as it is.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import advance_window
        >>> window = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 1, 3)  # one layer, slot and channel
        >>> inputs = torch.tensor([4.0, 5.0, 6.0]).view(1, 1, 3, 1)  # root and two drafts
        >>> advance_window(window, inputs, torch.tensor([1], dtype=torch.int32)), window.flatten()
        (tensor([0], dtype=torch.int32), tensor([3., 4., 5.]))
    """
    name = "advance_window"
    check = Checker.of(name, "window", window, "[layers, slots, channels, width]")
    check.tensor("window", window, LOGIT_DTYPES, ("layers", "slots", "channels", "width"))
    layers, _, channels, width = window.shape
    if not (layers and channels and 1 <= width <= MOST_WIDTH):
        fail(name, "window", f"of at least one layer and channel, and width of 1 to {MOST_WIDTH}", list(window.shape))
    check.tensor("inputs", inputs, (window.dtype,), (layers, "batch", "nodes", channels))
    batch, nodes = inputs.shape[1:3]
    if nodes == 0:
        fail(name, "inputs", "of a root at least", list(inputs.shape))
    check_steps(check, "window", window, num_accepted, path, slots, batch)
    status: Tensor = op(window, inputs, num_accepted, path, slots, device=window.device, backend=backend, out=out)
    return status
