"""The plan: what draft length, which static tree, and which improvement next, from measured numbers.

A run tells how often a step accepted at least k drafts, and how often it drafted so many. Cut at N drafts, a step
yields ``1 + sum of the first N shares`` tokens and costs the drafts it makes and a verification of them and one token
more, whose time grows with their number. Nothing is said of drafts longer than the run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import Any, NamedTuple

import torch

from . import theory

LONGEST = 16  # drafts of a step that are considered where no run was measured
BETTER = 0.1  # an improvement, as a share of what is left to gain or to save


class Measured(NamedTuple):
    """The input of a plan.

    Attributes:
        accepted: share of the steps that accept at least 1, 2, .. drafts.
        drafted: share of the steps that draft at least so many: below 1 where drafts end early.
        draft_time: seconds of one draft.
        verify_time: seconds of a step with one token, without its drafts.
        token_time: further seconds for each further token.
        children: probability that the first, second, .. child of a node of a tree is the accepted one.
        assumption: how these numbers were found, in a sentence.
    """

    accepted: tuple[float, ...]
    drafted: tuple[float, ...]
    draft_time: float
    verify_time: float
    token_time: float
    children: tuple[float, ...]
    assumption: str

    @property
    def longest(self) -> int:
        """Most drafts that are considered."""
        return len(self.drafted)

    def tokens(self, draft: int) -> float:
        """Tokens of a step with at most so many drafts."""
        return 1 + sum(self.accepted[:draft])

    def seconds(self, draft: int) -> float:
        """Seconds of that step."""
        drafts = sum(self.drafted[:draft])
        return drafts * (self.draft_time + self.token_time) + self.verify_time

    def speed(self, draft: int) -> float:
        """Tokens a second with at most so many drafts."""
        return self.tokens(draft) / self.seconds(draft)

    def best(self) -> int:
        """Draft length of the highest speed; of equal ones the shortest."""
        return max(range(self.longest + 1), key=self.speed)

    def with_fewer_rejections(self) -> Measured:
        """The same where a tenth of the rejections is avoided at each position."""
        accepted, share, before = [], 1.0, 1.0
        for after in self.accepted:
            kept = after / before if before else 0.0
            share *= kept + BETTER * (1 - kept)
            accepted.append(share)
            before = after
        return self._replace(accepted=tuple(map(min, accepted, self.drafted)))  # what is not drafted is not accepted


def constant(acceptance: float, draft_time: float, verify_time: float) -> Measured:
    """A plan of three numbers: acceptance and verification time do not depend on the draft length."""
    powers = tuple(accumulate(repeat(acceptance, LONGEST), mul))
    assumption = "acceptance and verification time are taken as constant: three numbers say no more"
    return Measured(powers, (1.0,) * LONGEST, draft_time, verify_time, 0.0, (acceptance,), assumption)


class Improvement(NamedTuple):
    """Gain of one change.

    Attributes:
        name: of the change.
        speed: tokens a second with the draft length that is then best.
        draft: that length.
    """

    name: str
    speed: float
    draft: int


def improvements(now: Measured) -> list[Improvement]:
    """A tenth of the rejections avoided, of the draft's or of the verification's time saved; the best first."""
    changed = {
        "a tenth of the rejections avoided": now.with_fewer_rejections(),
        "drafts a tenth faster": now._replace(draft_time=now.draft_time * (1 - BETTER)),
        "verification a tenth faster": now._replace(
            verify_time=now.verify_time * (1 - BETTER), token_time=now.token_time * (1 - BETTER)
        ),
    }
    found = [Improvement(name, then.speed(then.best()), then.best()) for name, then in changed.items()]
    return sorted(found, key=lambda improvement: -improvement.speed)


class Tree(NamedTuple):
    """A static tree.

    Attributes:
        parents: of its nodes; the root's is -1.
        tokens: of a step.
        speed: tokens a second.
    """

    parents: list[int]
    tokens: float
    speed: float


def best_tree(now: Measured, budget: int) -> Tree:
    """The fastest static tree of at most `budget` nodes, no deeper than what was measured (Sequoia's dynamic program).

    A level of a tree is one forward of the drafter, whatever its width.
    """
    parents, tokens, time = theory.fastest_tree(
        now.children,
        budget,
        now.draft_time,
        lambda nodes: now.verify_time + (nodes - 1) * now.token_time,
        deepest=now.longest,
    )
    return Tree(parents, tokens, 1 / time)


def levels(parents: Sequence[int]) -> list[int]:
    """How many nodes each depth has, the root first.

    Example:
        >>> from specdec_lab.plan import levels
        >>> levels([-1, 0, 0, 1])
        [1, 2, 1]
    """
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    return torch.bincount(torch.tensor(depth)).tolist()


def measured(run: dict[str, Any], method: str | None = None) -> Measured:
    """From the output of `compare --json`: the first row of the method (or of any that drafts) and the plain one.

    Raises:
        ValueError: it holds no such row, or something else.
    """
    try:
        return _of_rows(run["rows"], method)
    except (IndexError, KeyError, TypeError, ZeroDivisionError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"--run must hold what compare --json wrote of a method that drafts ({reason})") from error


def _of_rows(rows: list[dict[str, Any]], method: str | None) -> Measured:
    drafting = [row for row in rows if row["acceptance"] is not None]
    row = next((row for row in drafting if method in (None, row["method"])), None)
    if row is None:
        names = ", ".join(dict.fromkeys(row["method"] for row in drafting))
        raise ValueError(f"--run holds no method {method or 'that drafts'}: it has {names or 'none'}")
    if row.get("drafted_at_least") is None:
        raise ValueError("--run was written before compare counted drafts by position: run compare --json again")
    seconds, children = row["seconds"], tuple(row["acceptance_by_child"])
    first = children[0] / sum(children) if sum(children) else 1.0  # of a chain: one child, which is the first
    accepted = tuple(share * first ** (k + 1) for k, share in enumerate(row["accepted_at_least"]))
    drafts, verify = sum(row["drafted_at_least"]), _verify_seconds(seconds)
    same = ("temperature", "batch")
    plain = [r for r in rows if r["method"] == "plain" and all(r.get(name) == row.get(name) for name in same)]
    base, token, found = verify, 0.0, "verification time is taken as constant: the run has no row of plain decoding"
    if plain:
        one, verified = _verify_seconds(plain[0]["seconds"]), row["verified_per_step"]
        base, token = min(one, verify), max(verify - one, 0.0) / (verified - 1)
        found = f"verification takes {one * 1e3:.3g} ms for 1 token and {verify * 1e3:.3g} ms for {verified:.1f}"
    drafted, draft_time = tuple(row["drafted_at_least"]), _draft_seconds(seconds) / drafts
    assumption = f"{found}; drafts are no longer than the run's"
    return Measured(accepted, drafted, draft_time, base, token, children, assumption)


def _draft_seconds(seconds: dict[str, float]) -> float:
    return seconds["draft"] + seconds.get("networks", 0.0)


def _verify_seconds(seconds: dict[str, float]) -> float:
    return seconds["target"] + seconds["verify"] + seconds["commit"]
