"""How many tokens to draft: always the same number, or the one that what was measured calls for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
        """Length of the next step's drafts."""
        return self.longest

    def update(self, drafted: Sequence[int], accepted: Sequence[int], seconds: Mapping[str, float]) -> None:
        """Learn from a step: what each request was offered and accepted, and the time of each phase."""


class AdaptiveLength(FixedLength):
    """The length of largest expected speed-up at the acceptance and cost of late.

    The choice looks at past steps alone, whose random numbers no later step uses again, so the output distribution
    stays the target's. At least one token is drafted: without drafts nothing would be measured any more. With measured
    times the lengths, and so the texts of ``ratio`` and ``block``, differ from run to run; give `cost` where they must
    not.
    """

    def __init__(self, longest: int = 8, *, cost: float | None = None, memory: float = 16.0) -> None:
        """Choose between 1 and `longest`.

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
        self._sums = [0.0] * 6  # over steps: 1, length, its square, seconds after drafting, their product, of a draft

    @property
    def acceptance(self) -> float:
        """Accepted candidates, of those that were looked at."""
        return self._accepted / self._looked_at

    @property
    def cost(self) -> float:
        """Time of one draft token, drafted and verified, in units of a step without drafts."""
        if self._cost is not None:
            return self._cost
        steps, lengths, squares, others, products, drafts = self._sums
        if not others:
            return 0.1
        spread = steps * squares - lengths**2
        slope = (steps * products - lengths * others) / spread if spread > 1e-6 else 0.0
        slope = min(max(slope, 0.0), 0.5 * others / lengths)  # of few steps a line may say anything
        return (drafts + slope * steps) / (others - slope * lengths)

    def next(self) -> int:
        """Length of the next step's drafts."""
        rate, cost = self.acceptance, self.cost
        best, best_speed, tokens = 1, 0.0, 1.0
        for length in range(1, self.longest + 1):
            tokens += rate**length
            if (speed := tokens / (1 + length * cost)) > best_speed:
                best, best_speed = length, speed
        return best

    def update(self, drafted: Sequence[int], accepted: Sequence[int], seconds: Mapping[str, float]) -> None:
        """Learn from a step."""
        pairs = list(zip(drafted, accepted, strict=True))
        self._looked_at = self._fade * self._looked_at + sum(min(d, a + 1) for d, a in pairs)
        self._accepted = self._fade * self._accepted + sum(accepted)
        if longest := max(drafted, default=0):
            drafts = seconds["draft"] + seconds["networks"]
            others = sum(seconds.values()) - drafts
            new = 1.0, longest, longest**2, others, longest * others, drafts / longest
            self._sums = [self._fade * old + value for old, value in zip(self._sums, new, strict=True)]
