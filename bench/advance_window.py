"""advance_window beside the gather of PyTorch: the convolutions of 32 layers, 8,192 channels, kernel size 4, bfloat16.

python -m bench advance_window
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import advance_window

from .cases import DEVICE, OpCase
from .minimum import moved
from .suite import Run

LAYERS, DRAFT, CHANNELS, WIDTH = 32, 3, 8192, 3  # Qwen3-Next's queries, keys and values
QUICK = 1


@dataclass(frozen=True)
class WindowCase(OpCase):
    """A batch of windows."""

    batch: int = 1

    @property
    def words(self) -> str:
        """Model and batch."""
        return f"{LAYERS} layers, {CHANNELS} channels, kernel size {WIDTH + 1}, batch {self.batch}, {DRAFT} drafts"


CASES = [WindowCase("advance_window", batch) for batch in (16, 1)]


class WindowInput(NamedTuple):
    """Windows, the inputs of a step and its verdict."""

    window: Tensor
    inputs: Tensor
    num_accepted: Tensor


def inputs(case: WindowCase) -> list[WindowInput]:
    """Every count of accepted drafts in turn."""
    g = torch.Generator().manual_seed(0)
    window = torch.randn(LAYERS, case.batch, CHANNELS, WIDTH, generator=g).bfloat16()
    step = torch.randn(LAYERS, case.batch, DRAFT + 1, CHANNELS, generator=g).bfloat16()
    accepted = (torch.arange(case.batch, dtype=torch.int32) + 2) % (DRAFT + 1)
    return [WindowInput(window.to(DEVICE), step.to(DEVICE), accepted.to(DEVICE))]


def ours(case: WindowCase, x: WindowInput, backend: str) -> None:
    """One call of the package."""
    advance_window(x.window, x.inputs, x.num_accepted, backend=backend)


def minimum(case: WindowCase, x: WindowInput, result: None) -> int:
    """Each window written; of what it then holds, every number was read somewhere."""
    return 2 * moved(x.window)


def gathered(x: WindowInput) -> None:
    """Window and inputs in one tensor, of which the last of each request are gathered."""
    row = torch.cat([x.window, x.inputs.mT], 3)
    last = x.num_accepted.long()[:, None] + 1 + torch.arange(WIDTH, device=x.num_accepted.device)
    x.window.copy_(row.gather(3, last[:, None].expand(*row.shape[:3], -1)))


def check(case: WindowCase, run: Run, x: WindowInput) -> None:
    """The windows that a gather makes."""
    plain = x._replace(window=x.window.clone())
    gathered(plain)
    run(x)
    assert torch.equal(x.window, plain.window)


def rivals(case: WindowCase, made: Sequence[WindowInput]) -> dict[str, Run]:
    """PyTorch alone."""
    return {"cat + gather": gathered}
