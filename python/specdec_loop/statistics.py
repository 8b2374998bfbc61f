"""Statistics of a decoding run: acceptance of each request, time by phase, tokens expected of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Number = float | int | Tensor
PHASES = ("draft", "networks", "target", "verify", "commit")  # networks: the drafter's own forwards


@dataclass
class RequestStatistics:
    """Steps of one request, up to the one that finished it; its first token came with the prompt, before them.

    Attributes:
        drafted: candidates offered in each step: length of the chain, depth of the tree.
        accepted: how many of them in a row were accepted in each step.
        children: which child of its parent each accepted candidate was, 0 the first, of all steps; in chains always 0.
        verified: tokens verified in all steps: the candidates of each, and the token before them.
        tokens: tokens of the text, without the prompt; fewer than accepted and drawn where a stop or the limit cut.
        seconds: from the end of the prefill to the end of the request's last step.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)
    verified: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(
        self, accepted: int, token_ids: Sequence[int], parents: Sequence[int] = (), path: Sequence[int] = ()
    ) -> None:
        """Note a step.

        Args:
            accepted: candidates in a row.
            token_ids: of a chain, or of a tree's nodes; -1: no candidate.
            parents: of a tree; a parent comes before its children, padding has none.
            path: of a tree: the accepted nodes.

        Example:
            >>> from specdec_loop.statistics import RequestStatistics
            >>> request = RequestStatistics()
            >>> request.add(1, [7, 8, -1])
            >>> request.add(2, [5, 7, 8, 9, 6], [-1, 0, 0, 2, 3], [2, 3, -1])
            >>> request.drafted, request.accepted, request.children
            ([2, 3], [1, 2], [0, 1, 0])
        """
        self.accepted.append(accepted)
        self.verified += 1 + sum(token >= 0 for token in token_ids[bool(parents) :])  # node 0 of a tree is its root
        if not parents:
            self.drafted.append(sum(token >= 0 for token in token_ids))
            self.children += [0] * accepted
            return
        depth, deepest = [0], 0
        for parent, token in zip(parents[1:], token_ids[1:], strict=True):
            depth.append(below := depth[parent] + 1 if parent >= 0 else 0)
            if below > deepest and token >= 0:
                deepest = below
        self.drafted.append(deepest)
        self.children += [parents[:node].count(parents[node]) for node in path[:accepted]]

    @property
    def steps(self) -> int:
        """Target forwards behind the prompt's."""
        return len(self.accepted)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step."""
        return (self.tokens - 1) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed of this request behind the prompt, others running beside it."""
        return (self.tokens - 1) / self.seconds if self.seconds else 0.0

    def acceptance_by_position(self) -> list[float]:
        """Share of the candidates at position i that were accepted, among those that were looked at.

        Example:
            >>> from specdec_loop.statistics import RequestStatistics
            >>> RequestStatistics(drafted=[3, 3, 1], accepted=[2, 0, 1]).acceptance_by_position()
            [0.6666666666666666, 1.0, 0.0]
        """
        return acceptance_by_position(zip(self.drafted, self.accepted, strict=True))


def acceptance_by_position(steps: Iterable[tuple[int, int]]) -> list[float]:
    """The same of any steps, each given by what was offered and how many of it in a row were accepted."""
    steps = list(steps)
    places = range(max((d for d, _ in steps), default=0))
    looked_at = [[a > i for d, a in steps if min(d, a + 1) > i] for i in places]
    return [sum(position) / len(position) for position in looked_at if position]


def shares_at_least(counts: Iterable[int]) -> list[float]:
    """Share of the steps whose count is at least 1, 2, .. up to the largest.

    Example:
        >>> from specdec_loop.statistics import shares_at_least
        >>> shares_at_least([3, 1, 0, 1])
        [0.75, 0.25, 0.25]
    """
    counts = list(counts)
    return [sum(count >= least for count in counts) / len(counts) for least in range(1, max(counts, default=0) + 1)]


def acceptance_by_child(children: Sequence[int], looked_at: int) -> list[float]:
    """Probability that the first, second, .. child of a node is the accepted one, of the nodes looked at.

    Example:
        >>> from specdec_loop.statistics import acceptance_by_child
        >>> acceptance_by_child([0, 0, 1, 0], 6)
        [0.5, 0.16666666666666666]
    """
    return [children.count(rank) / looked_at for rank in range(max(children, default=0) + 1)]


class Clock:
    """Seconds of each phase, on the clock of the device: on a GPU by events, which nothing waits for but `settle`."""

    def __init__(self, device: torch.device) -> None:
        """Begin."""
        self._is_cuda = device.type == "cuda"
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.latest = dict.fromkeys(PHASES, 0.0)  # of the last step
        self.begin()

    def begin(self) -> None:
        """Forget what was marked since the last `settle`: the run begins here."""
        self._spent = dict.fromkeys(PHASES, 0.0)  # since then
        self._events = [("", self._event())] if self._is_cuda else []  # phase, and its end
        self.begun = self._since = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Credit the time since the last mark to a phase."""
        if self._is_cuda:
            self._events.append((phase, self._event()))
        else:
            now = time.perf_counter()
            self._spent[phase] += now - self._since
            self._since = now

    def settle(self) -> float:
        """Add up a step whose results the host has read; returns seconds since the clock began."""
        if self._is_cuda:
            self._events[-1][1].synchronize()  # what comes before it is done: the host has read its results
            for (_, start), (phase, end) in pairwise(self._events):
                self._spent[phase] += start.elapsed_time(end) / 1000
            self._events = self._events[-1:]
        self.latest, self._spent = self._spent, dict.fromkeys(PHASES, 0.0)
        for phase, seconds in self.latest.items():
            self.seconds[phase] += seconds
        return time.perf_counter() - self.begun

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def expected_tokens(rate: Number, draft: Number) -> Tensor:
    """Tokens a step: the accepted drafts and the one that verification draws, 1 + P + .. + P^N.

    Example:
        >>> from specdec_loop.statistics import expected_tokens
        >>> round(float(expected_tokens(0.8, 4)), 4)
        3.3616
    """
    p, n = torch.broadcast_tensors(*(torch.as_tensor(x, dtype=torch.float64) for x in (rate, draft)))
    open_ = p < 1
    return 1 + torch.where(open_, p * (1 - p**n) / torch.where(open_, 1 - p, 1.0), n)
