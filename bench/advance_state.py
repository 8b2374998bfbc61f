"""advance_state beside replay in PyTorch and snapshots: 4 layers, 32 heads x 128 x 128, float32 states.

python -m bench advance_state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import advance_state

from .cases import DEVICE, OpCase
from .minimum import moved
from .suite import Run

LAYERS, DRAFT, HEADS, KEY_HEADS, DIM = 4, 3, 32, 16, 128  # Qwen3-Next's heads; 4 layers stand for 36: all are alike
QUICK = 1


@dataclass(frozen=True)
class StateCase(OpCase):
    """A batch of recurrent states."""

    batch: int = 1

    @property
    def words(self) -> str:
        """Model and batch."""
        return f"Qwen3-Next-like {LAYERS} layers, batch {self.batch}, {DRAFT} drafts"


CASES = [StateCase("advance_state", batch) for batch in (4, 1)]


class ReplayInput(NamedTuple):
    """States, the inputs of a step, its verdict, and what snapshots would be."""

    state: Tensor
    keys: Tensor
    values: Tensor
    log_decay: Tensor
    beta: Tensor
    num_accepted: Tensor
    snapshots: list[Tensor]  # a layer: [batch, DRAFT + 1, HEADS, DIM, DIM]


def inputs(case: StateCase) -> list[ReplayInput]:
    """Every count of accepted drafts in turn."""
    at, g = (LAYERS, case.batch, DRAFT + 1), torch.Generator().manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(*at, KEY_HEADS, DIM, generator=g), dim=-1).bfloat16()
    values = torch.randn(*at, HEADS, DIM, generator=g).bfloat16()
    gates = torch.rand(2, *at, HEADS, generator=g)
    state = torch.randn(LAYERS, case.batch, HEADS, DIM, DIM, generator=g)
    accepted = (torch.arange(case.batch, dtype=torch.int32) + 2) % (DRAFT + 1)
    made = [t.to(DEVICE) for t in (state, keys, values, -gates[0], gates[1], accepted)]
    kept = [torch.zeros(case.batch, DRAFT + 1, HEADS, DIM, DIM, device=DEVICE) for _ in range(LAYERS)]
    return [ReplayInput(*made, kept)]


def ours(case: StateCase, x: ReplayInput, backend: str) -> None:
    """One call of the package."""
    given = {"log_decay": x.log_decay, "beta": x.beta}
    advance_state(x.state, x.keys, x.values, x.num_accepted, **given, backend=backend)


def minimum(case: StateCase, x: ReplayInput, result: None) -> int:
    """Each state read and written, the inputs of accepted tokens read."""
    tokens = int((x.num_accepted + 1).sum())
    step = moved(x.keys, x.values, x.log_decay, x.beta) // (case.batch * (DRAFT + 1))
    return 2 * moved(x.state) + tokens * step


def replayed(x: ReplayInput) -> None:
    """Batched products, a token at a time; requests that have no such token keep their state."""
    keys, values = (t.float() for t in (x.keys.repeat_interleave(HEADS // KEY_HEADS, 3), x.values))
    for t in range(DRAFT + 1):
        after = x.state * x.log_decay[:, :, t, :, None, None].exp()
        k = keys[:, :, t, :, :, None]
        update = x.beta[:, :, t, :, None] * (values[:, :, t] - (after * k).sum(-2))
        takes = (x.num_accepted >= t)[:, None, None, None]
        x.state.copy_(torch.where(takes, after + k * update[..., None, :], x.state))


def selected(x: ReplayInput) -> None:
    """The move alone; to write the snapshots took a state's bytes a token before."""
    request = torch.arange(len(x.num_accepted), device=x.num_accepted.device)
    for states in x.snapshots:
        states[:, 0] = states[request, x.num_accepted]


def check(case: StateCase, run: Run, x: ReplayInput) -> None:
    """The states of the replay in PyTorch."""
    plain = x._replace(state=x.state.clone())
    replayed(plain)
    run(x)
    if run is not selected:
        assert float((x.state - plain.state).abs().max()) < 1e-4


def rivals(case: StateCase, made: Sequence[ReplayInput]) -> dict[str, Run]:
    """Replay, and what has snapshots."""
    return {"replay in PyTorch": replayed, "index of snapshots": selected}
