"""select_state beside one index a layer: recurrent states of 32 layers, 64 heads x 64 x 128, bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import CacheLayout, select_state

from .caches import CacheCase
from .cases import DEVICE
from .minimum import moved
from .suite import Run

LAYERS, DRAFT, STATE = 8, 3, (64, 64, 128)  # 8 layers stand for 32: all are alike
QUICK = 1
CASES = [CacheCase("select_state", 32, batch, "blhd") for batch in (4, 1)]


class StateInput(NamedTuple):
    """States of every layer and the verdict."""

    states: list[Tensor]  # [batch, DRAFT + 1, *STATE]
    layout: CacheLayout
    num_accepted: Tensor


def inputs(case: CacheCase) -> list[StateInput]:
    """Every count of accepted tokens in turn."""
    states = [torch.ones(case.batch, DRAFT + 1, *STATE, dtype=torch.bfloat16, device=DEVICE) for _ in range(LAYERS)]
    accepted = (torch.arange(case.batch, dtype=torch.int32, device=DEVICE) + 2) % (DRAFT + 1)
    return [StateInput(states, CacheLayout(states, "blhd"), accepted)]


def ours(case: CacheCase, x: StateInput, backend: str) -> None:
    """One call of the package."""
    select_state(x.layout, x.num_accepted, backend=backend)


def minimum(case: CacheCase, x: StateInput, result: None) -> int:
    """Bytes of the states that change their place, read and written."""
    return 2 * int((x.num_accepted > 0).sum()) * sum(moved(states[0, 0]) for states in x.states)


def indexed(x: StateInput) -> None:
    """One advanced index a layer."""
    request = torch.arange(len(x.num_accepted), device=x.num_accepted.device)
    for states in x.states:
        states[:, 0] = states[request, x.num_accepted]


def check(case: CacheCase, run: Run, x: StateInput) -> None:
    """The states that an index selects."""
    for s in x.states:
        s.copy_(torch.rand_like(s[:, :, :1]).expand_as(s))
    want = [s[torch.arange(len(s), device=s.device), x.num_accepted] for s in x.states]
    run(x)
    assert all(torch.equal(s[:, 0], w) for s, w in zip(x.states, want, strict=True))


def rivals(case: CacheCase, made: Sequence[StateInput]) -> dict[str, Run]:
    """One."""
    return {"index a layer": indexed}
