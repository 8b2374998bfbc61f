"""Select the recurrent state after the last accepted token, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._cache import CacheLayout
from ..._check import Checker, fail
from ..._codes import Backend
from ..._op import Op, Shape
from . import reference


def _shapes(*args: Any) -> tuple[Shape, ...]:
    return ((args[-1].shape, torch.int32),)


op = Op(reference.select_state, _shapes, results=("status",), mutates=("tensors",))


def select_state(
    layout: CacheLayout, num_accepted: Tensor, *, out: Tensor | None = None, backend: Backend | None = None
) -> Tensor:
    """Put the recurrent state after the last accepted token into slot 0, for all layers in one launch.

    A recurrent layer (Mamba, gated delta net) cannot take a token back, so a step keeps the state after each of its
    tokens: slot 0 after the root, slot i after draft i. Then ``state[b, 0] = state[b, num_accepted[b]]``. Only slot 0
    is written, and no slot is read after it was written, so this is safe in place.

    Args:
        layout: the states: format ``"blhd"`` for tensors ``[batch, draft + 1, ...]``, or ``"slots"`` for pools
            ``[slot, ...]`` with the table ``[batch, draft + 1]`` of each request's slots. Convolution states, too.
        num_accepted: int32 ``[batch]``; where it is 0 nothing moves; -1: the request took no part in this step.
        out: preallocated status.
        backend: see `verify_chain`.

    Returns:
        status, int32 ``[batch]``: 32 where there is no such state or num_accepted is below -1; nothing of that
        request moves.

    Raises:
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> import torch
        >>> from specdec_kernels import CacheLayout, select_state
        >>> states = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[..., None]  # [batch, draft + 1, state]
        >>> select_state(CacheLayout([states], "blhd"), torch.tensor([2, 0], dtype=torch.int32)), states[:, 0, 0]
        (tensor([0, 0], dtype=torch.int32), tensor([3., 4.]))
    """
    if not isinstance(layout, CacheLayout):
        fail("select_state", "layout", "a CacheLayout", type(layout).__name__)
    check = Checker("select_state", layout.device)
    check.vector("num_accepted", num_accepted, (torch.int32,), layout.batch)
    status: Tensor = op(
        layout.tensors, layout.table, layout.block_table, layout.page_size, layout.num_pages, num_accepted,
        device=layout.device, backend=backend, out=out,
    )  # fmt: skip
    return status
