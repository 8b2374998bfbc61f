"""How many tokens to draft and verify: always the same number, or the one that what was measured calls for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PAUSE, LONGEST_PAUSE = 4, 64  # steps until what did not pay is tried again: the first time, and at most
MARGIN = 1.1  # speed-up below which no draft is made: the slowest of a batch gains less than the mean
CLOSE = 1.4  # speed-up below which what a step without drafts takes is measured again now and then


class FixedLength:
    """Always the same."""

    def __init__(self, longest: int) -> None:
        """Draft `longest` tokens.

        Raises:
            ValueError: fewer than 1.
        """
        if not isinstance(longest, int) or longest < 1:
            raise ValueError(f"draft_length must be an int >= 1 or an AdaptiveLength, got {longest!r}")
        self.longest = longest

    def next(self) -> int:
        """Length of the next step's drafts; 0: none."""
        return self.longest

    def verified(self, lengths: Sequence[int]) -> int:
        """How many columns to verify where the slowest requests' chains, looked up in no time, have these lengths."""
        return max(lengths, default=0)

    def update(self, drafted: Sequence[int], accepted: Sequence[int], seconds: Mapping[str, float], width: int) -> None:
        """Learn from a step.

        Args:
            drafted: what the slowest requests were offered, those that the call ends with.
            accepted: what they accepted of it.
            seconds: time of each phase.
            width: columns of drafts that the batch verified.
        """


class AdaptiveLength(FixedLength):
    """The length of largest expected speed at the acceptance and cost of late; 0 where no draft pays.

    A batch runs as ``[batch, 1 + length]``, so its requests share a length, and one more column takes the time of a
    token of each. What counts is the requests that have most tokens to go, for `generate` returns with the last of
    them. The choice looks at past steps, whose random numbers no later step uses again, and at how long copied
    drafts are, never at what was drawn, so the output distribution stays the target's. Where drafts do not pay they are
    tried again, more and more seldom. With measured times the lengths, and so the texts of ``ratio`` and ``block``,
    differ from run to run; give `cost` where they must not.
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
        if memory < 1 or (cost is not None and cost < 0):
            raise ValueError(f"AdaptiveLength: memory >= 1 and cost >= 0 expected, got {memory} and {cost}")
        self._fade, self._cost = 1 - 1 / memory, cost
        self._looked_at, self._accepted = 2.0, 1.0  # as if of two candidates one had been accepted
        self._sums = [0.0] * 6  # over drafts: 1, length, its square, seconds after drafting, their product, of a draft
        self._plain = [0.0] * 2  # over steps without drafts: 1, seconds
        self._promise, self._kept = 1.0, [2.0, 2.0]  # tokens of this step's drafts; over drafts: tokens, promised ones
        self._since_drafts = self._since_plain = 0  # steps
        self._drafts_pause = self._plain_pause = PAUSE
        self._is_copied = False  # drafts cost nothing: `verified` decides

    @property
    def acceptance(self) -> float:
        """Accepted candidates, of those that were looked at."""
        return self._accepted / self._looked_at

    @property
    def cost(self) -> float:
        """Time of one draft token, drafted and verified, in units of a step without drafts."""
        _, drafting, verifying = self._times()
        return drafting + verifying

    def next(self) -> int:
        """Length of the next step's drafts."""
        if self._is_copied:
            return self.longest
        return self._best([self.longest], are_drafted=False)

    def verified(self, lengths: Sequence[int]) -> int:
        """How many columns to verify of chains of these lengths."""
        self._is_copied = True
        return self._best(lengths, are_drafted=True)

    def update(self, drafted: Sequence[int], accepted: Sequence[int], seconds: Mapping[str, float], width: int) -> None:
        """Learn from a step."""
        if width > 0:
            pairs = list(zip(drafted, accepted, strict=True))
            self._looked_at = self._fade * self._looked_at + sum(min(d, a + 1) for d, a in pairs)
            self._accepted = self._fade * self._accepted + sum(accepted)
            self._note(self._kept, sum(accepted) / max(len(accepted), 1), self._promise)
            drafts = seconds["draft"] + seconds["networks"]
            others = sum(seconds.values()) - drafts
            each = drafts / width
            if self._since_drafts and self._sums[0]:  # a drafter first reads what it missed: that is no draft's time
                each = self._sums[5] / self._sums[0]
            self._note(self._sums, 1.0, width, width**2, others, width * others, each)
            pause = self._drafts_pause
            self._drafts_pause = min(2 * pause, LONGEST_PAUSE) if self._since_drafts else max(pause // 2, PAUSE)
            self._since_drafts, self._since_plain = 0, self._since_plain + 1
        else:
            self._note(self._plain, 1.0, sum(seconds.values()))
            if self._since_plain:
                self._plain_pause = min(2 * self._plain_pause, LONGEST_PAUSE)
            self._since_drafts, self._since_plain = self._since_drafts + 1, 0

    def _note(self, sums: list[float], *values: float) -> None:
        sums[:] = [self._fade * old + value for old, value in zip(sums, values, strict=True)]

    def _best(self, lengths: Sequence[int], *, are_drafted: bool) -> int:
        """The fastest length where requests have up to so many drafts, or the one whose time is to be measured."""
        tokens = [float(len(lengths))]  # expected of 0, 1, .. drafts
        for n in range(1, 1 + max(lengths)):
            tokens.append(tokens[-1] + self.acceptance**n * sum(length >= n for length in lengths))
        start, drafting, verifying = self._times()
        each = verifying if are_drafted else drafting + verifying
        worth = min(self._kept[0] / self._kept[1], 1.0)  # drafts may end early, and requests differ
        gains = [1.0] + [1 + worth * (t / tokens[0] - 1) for t in tokens[1:]]
        speeds = [g / (start + n * each) for n, g in enumerate(gains)]
        speeds[0] = MARGIN if self._cost is None else 1.0
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if self._since_drafts >= self._drafts_pause and len(speeds) > 1:
            best = max(range(1, len(speeds)), key=speeds.__getitem__)
        elif self._cost is None and self._since_plain >= self._plain_pause:
            best = 0 if speeds[best] < CLOSE or not self._plain[0] else best
        self._promise = tokens[best] / tokens[0] - 1
        return best

    def _times(self) -> tuple[float, float, float]:
        """Of a step with drafts, in units of one without: its time beside them, of drafting one, of verifying one."""
        if self._cost is not None or not self._sums[0]:
            return 1.0, 0.0, 0.1 if self._cost is None else self._cost
        steps, lengths, squares, others, products, drafts = self._sums
        mean, length = others / steps, lengths / steps
        plain = self._plain[1] / self._plain[0] if self._plain[0] else None
        spread, each = squares / steps - length**2, 0.0
        if spread > 1e-6:
            each = (products / steps - mean * length) / spread
        elif plain is not None:
            each = (mean - plain) / length
        each = min(max(each, 0.0), 0.5 * mean / length)  # of few steps a line may say anything
        start = mean - each * length
        base = start if plain is None else min(plain, mean)  # no step without drafts takes longer than one with them
        return start / base, drafts / steps / base, each / base
