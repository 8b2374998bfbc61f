"""How many tokens to draft and verify: always the same number, or the one that what was measured calls for."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low

MARGIN = 1.05  # expected speed-up below which a draft is a trial: the slowest of a batch gains less than the mean
HORIZON = 40  # steps whose expected gain, beyond the margin, a call may lose before it comes
FORGIVEN = 0.005  # of all time: so much of it trials may lose
SLOWEST = 3.0  # most usual steps that one step counts for: another program may have run
PAUSE, LONGEST_PAUSE = 4, 64  # steps with drafts until one without is measured again: the first time, and at most
LARGE = 0.4  # gain of drafts from which on the pause grows with it: a step without them costs as much
OLD = 2 * LONGEST_PAUSE  # age in steps of a time that no longer counts beside a new one: a machine's speed changes
ALIKE = 0.2  # share by which the time of a step without drafts differs from the usual one where nothing has changed


class FixedLength:
    """Always the same.

    Attributes:
        measures: whether the length follows the time of steps.
    """

    measures = False

    def __init__(self, longest: int) -> None:
        """Draft `longest` tokens.

        Raises:
            ValueError: fewer than 1.
        """
        if not isinstance(longest, int) or longest < 1:
            raise ValueError(f"draft_length must be an int >= 1 or an AdaptiveLength, got {longest!r}")
        self.longest = longest

    def begin(self, nodes: Callable[[int], int]) -> None:
        """New texts; `nodes` says how many tokens a request's forward has at most where drafts are so long or deep."""

    def next(self) -> int:
        """Length of the next step's drafts; 0: none."""
        return self.longest

    def verified(self, lengths: Sequence[int]) -> int:
        """How many columns to verify where the slowest requests' chains, looked up in no time, have these lengths."""
        return max(lengths, default=0)

    def update(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: Mapping[str, float],
        width: int,
        tokens: float,
    ) -> None:
        """Learn from a step.

        Args:
            drafted: what the slowest requests were offered, those that the call ends with.
            accepted: what they accepted of it.
            seconds: time of each phase.
            width: columns of drafts that the batch verified.
            tokens: by which the end of the call came nearer: plain decoding takes a step for each.
        """


class AdaptiveLength(FixedLength):
    """The length of largest expected speed at the acceptance and cost of late; 0 where no draft pays.

    A batch runs as ``[batch, 1 + length]``, so its requests share a length, and one more column takes the time of a
    token of each. `generate` returns with the request that has most tokens to go, so a draft pays as far as it brings
    that end nearer. The time that drafts take beyond plain decoding of as many tokens is a debt. A call makes drafts
    while it has added less to the debt than it expects them to gain in the next `HORIZON` steps. Other drafts are
    trials, made only at a debt of zero. A share of `FORGIVEN` of all time is forgiven, so trials lose no more.

    The choice looks at past steps, whose random numbers no later step uses again, and at how long copied drafts are,
    never at what was drawn, so the output distribution stays the target's. With measured times the lengths, and so the
    texts of ``ratio`` and ``block``, differ from run to run; give `cost` where they must not.
    """

    def __init__(self, longest: int = 8, *, cost: float | None = None, memory: float = 16.0) -> None:
        """Choose between 0 and `longest`.

        Args:
            longest: bound of the length.
            cost: time of one draft token in units of a step without drafts; None: measured.
            memory: steps that count; those before them fade.

        Raises:
            ValueError: a value out of range.
        """
        super().__init__(longest)
        if not 1 <= memory < math.inf or not (cost is None or cost >= 0):
            raise ValueError(f"AdaptiveLength: a finite memory >= 1 and cost >= 0 expected, got {memory} and {cost}")
        self._fade, self._cost, self.measures = 1 - 1 / memory, cost, cost is None
        self._looked_at, self._accepted = 2.0, 1.0  # as if of two candidates one had been accepted
        self._nodes: Callable[[int], int] = lambda length: 1 + length
        # Numbers and seconds of the last steps beside drafting, by nodes; seconds of drafting a token.
        self._steps: dict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=math.ceil(memory)))
        self._drafting: deque[float] = deque(maxlen=math.ceil(memory))
        self._usual: dict[int, float] = {}  # medians of `_steps`, which every choice asks for
        self._promise, self._kept = 1.0, [2.0, 2.0]  # tokens of this step's drafts; over drafts: tokens, promised ones
        self._all = [2.0, 1.0, 2.0, 2.0]  # of all steps: candidates looked at, accepted; tokens kept, promised
        self._debt = self._old_debt = 0.0  # in steps without drafts: time that drafts lost, and before this call
        self._number = self._since_drafts = self._since_plain = 0  # steps
        self._pause = PAUSE
        self._is_copied = False  # drafts cost nothing: `verified` decides

    def begin(self, nodes: Callable[[int], int]) -> None:
        """New texts: expect of them what all requests before gave, not the last ones of a call."""
        self._nodes = nodes
        looked_at, accepted, kept, promised = self._all
        self._accepted = self._looked_at * accepted / looked_at
        self._kept = [self._kept[1] * kept / promised, self._kept[1]]
        self._old_debt = self._debt

    @property
    def acceptance(self) -> float:
        """Accepted candidates, of those that were looked at."""
        return self._accepted / self._looked_at

    @property
    def cost(self) -> float:
        """Time of one draft token, drafted and verified, in units of a step without drafts."""
        return self._time(1, are_drafted=False) - 1

    def next(self) -> int:
        """Length of the next step's drafts; copies are looked up where full ones for all requests would be verified."""
        best = self._best([self.longest], are_drafted=self._is_copied)
        return self.longest if best and self._is_copied else best

    def verified(self, lengths: Sequence[int]) -> int:
        """How many columns to verify of chains of these lengths."""
        self._is_copied = True
        return self._best(lengths, are_drafted=True)

    def update(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: Mapping[str, float],
        width: int,
        tokens: float,
    ) -> None:
        """Learn from a step."""
        self._number += 1
        self._debt = max(self._debt + min(self._charged(seconds, width) - tokens, SLOWEST), 0.0)
        if width > 0:
            looked_at, taken = sum(min(d, a + 1) for d, a in zip(drafted, accepted, strict=True)), sum(accepted)
            self._looked_at = self._fade * self._looked_at + looked_at
            self._accepted = self._fade * self._accepted + taken
            # One request without drafts holds the end up; what the others accepted still brings later ends nearer.
            kept = (taken / len(accepted) + tokens - 1) / 2
            self._note(self._kept, kept, self._promise)
            found = (looked_at, taken, kept * len(accepted), self._promise * len(accepted))
            self._all = [old + new for old, new in zip(self._all, found, strict=True)]
            drafts = seconds["draft"] + seconds["networks"]
            self._timed(self._nodes(width), sum(seconds.values()) - drafts)
            if not (self._since_drafts and self._drafting):  # a drafter first reads what it missed: no draft's time
                self._drafting.append(drafts / width)
            self._since_drafts, self._since_plain = 0, self._since_plain + 1
        else:
            time = sum(seconds.values())
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if self._since_plain else PAUSE
            if self._since_plain and abs(time - self._usual.get(1, time)) > ALIKE * time:
                self._steps[1].clear()
                self._pause = PAUSE  # it may be chance
            self._timed(1, time)
            self._since_drafts, self._since_plain = self._since_drafts + 1, 0

    def _timed(self, nodes: int, seconds: float) -> None:
        steps = self._steps[nodes]
        steps.append((self._number, seconds))
        while self._number - steps[0][0] > OLD:
            steps.popleft()
        self._usual[nodes] = median_low([time for _, time in steps])

    def _note(self, sums: list[float], *values: float) -> None:
        sums[:] = [self._fade * old + value for old, value in zip(sums, values, strict=True)]

    def _best(self, lengths: Sequence[int], *, are_drafted: bool) -> int:
        """The fastest length where requests have up to so many drafts, or the one whose time is to be measured."""
        tokens = [float(len(lengths))]  # expected of 0, 1, .. drafts
        for n in range(1, 1 + max(lengths)):
            tokens.append(tokens[-1] + self.acceptance**n * sum(length >= n for length in lengths))
        worth = min(self._kept[0] / self._kept[1], 1.0)  # drafts may end early, and requests differ
        gains = [1.0] + [1 + worth * (t / tokens[0] - 1) for t in tokens[1:]]
        speeds = [g / self._time(n, are_drafted=are_drafted) for n, g in enumerate(gains)]
        best = max(range(1, len(speeds)), key=speeds.__getitem__, default=0)
        if not self._may_draft(speeds[best]):
            best = 0
        self._promise = tokens[best] / tokens[0] - 1
        return best

    def _may_draft(self, speed: float) -> bool:
        """Whether to make a draft of this expected speed-up, and not a step without one, which is measured too."""
        is_due = 1 not in self._usual or self._since_plain >= self._pause * max((speed - 1) / LARGE, 1.0)
        if self._cost is None and is_due:
            return False
        gain = HORIZON * (speed - (MARGIN if self._cost is None else 1.0))
        return self._debt == 0 or self._debt - self._old_debt < gain

    def _charged(self, seconds: Mapping[str, float], width: int) -> float:
        """Time of a step in steps without drafts, less what is forgiven of it."""
        time = 1.0
        if self._cost is not None:
            time += (self._nodes(width) - 1) * self._cost
        elif width and 1 in self._usual:
            time = max(sum(seconds.values()) / self._usual[1], 1.0)
        return (1 - FORGIVEN) * time

    def _time(self, length: int, *, are_drafted: bool) -> float:
        """Of a step with drafts, in units of one without: a line between measured numbers of nodes, and beyond them."""
        nodes = self._nodes(length)
        if self._cost is not None or not self._drafting:
            return 1 + (nodes - 1) * (0.1 if self._cost is None else self._cost)
        known = self._usual if 1 in self._usual else {1: min(self._usual.values()), **self._usual}
        plain = known[1]
        above = min((n for n in known if n >= nodes), default=max(known))
        below = max((n for n in known if n < above), default=1) if nodes <= above else 1
        slope = (known[above] - known[below]) / max(above - below, 1)
        verifying = max((known[above] + slope * (nodes - above)) / plain, 1.0)
        return verifying + (0.0 if are_drafted else length * median_low(self._drafting) / plain)
