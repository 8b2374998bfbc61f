"""The plan: what draft length, which static tree, and which improvement next, from measured numbers.

With P the probability that a draft is accepted, a draft of N tokens costs N T_draft + T_verify and yields
(1 - P^(N+1)) / (1 - P) tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import theory

LONGEST = 64  # drafts of a step that are considered
BETTER = 0.1  # an improvement, as a share of what is left to gain or to save


class Measured(NamedTuple):
    """Measured input of a plan.

    Attributes:
        acceptance: P, of one draft given that those before it were accepted.
        draft_time: seconds of one draft.
        verify_time: seconds of a step without its drafts.
        children: probability that the first, second, .. child of a node of a tree is the accepted one.
    """

    acceptance: float
    draft_time: float
    verify_time: float
    children: tuple[float, ...]

    def speed(self, draft: int) -> float:
        """Tokens a second with drafts of this length."""
        return float(theory.throughput(self.acceptance, draft, self.draft_time, self.verify_time))

    def best(self) -> int:
        """Draft length of the highest speed."""
        cost = self.draft_time / self.verify_time
        return int(theory.optimal_draft(self.acceptance, cost, longest=LONGEST))


class Improvement(NamedTuple):
    """Gain of one change.

    Attributes:
        name: of the change.
        speed: tokens a second with the draft length that is then best.
        draft: that length.
        then: what would be measured.
    """

    name: str
    speed: float
    draft: int
    then: Measured


def improvements(now: Measured) -> list[Improvement]:
    """A tenth of the rejections avoided, of the draft's or of the verification's time saved; the best first."""
    changed = {
        "a tenth of the rejections avoided": now._replace(acceptance=now.acceptance + BETTER * (1 - now.acceptance)),
        "drafts a tenth faster": now._replace(draft_time=now.draft_time * (1 - BETTER)),
        "verification a tenth faster": now._replace(verify_time=now.verify_time * (1 - BETTER)),
    }
    found = [Improvement(name, then.speed(then.best()), then.best(), then) for name, then in changed.items()]
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
    """The fastest static tree of at most `budget` nodes (Sequoia's dynamic program).

    A level of a tree is one forward of the drafter, whatever its width, and verification takes `verify_time`.
    """
    parents, tokens, time = theory.fastest_tree(now.children, budget, now.draft_time, lambda _: now.verify_time)
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
    """From the JSON of a run.

    Either what `compare --json` writes: of the first row of the method (of the first that drafts) its acceptance by
    child, and its seconds of a step by phase. Or what `generate` reports: ``drafted`` and ``accepted`` (a number a
    step) and ``seconds`` by phase of all steps.
    """
    try:
        if "rows" in run:
            row = next(r for r in run["rows"] if r["acceptance"] is not None and method in (None, r["method"]))
            seconds, steps, drafts = row["seconds"], 1, len(row["acceptance_by_position"])
            children = tuple(row["acceptance_by_child"])
            acceptance = children[0]  # of a chain; that of a tree, any child, is their sum
        else:
            drafted, accepted, seconds = run["drafted"], run["accepted"], run["seconds"]
            looked_at = sum(min(d, a + 1) for d, a in zip(drafted, accepted, strict=True))
            acceptance, steps, drafts = sum(accepted) / looked_at, len(drafted), sum(drafted)
            children = (acceptance,)
        verify_time = sum(seconds[phase] for phase in ("target", "verify", "commit")) / steps
        draft_time = (seconds["draft"] + seconds.get("networks", 0.0)) / drafts
        return Measured(acceptance, draft_time, verify_time, children)
    except StopIteration as error:
        names = ", ".join(dict.fromkeys(r["method"] for r in run["rows"] if r["acceptance"] is not None))
        raise ValueError(f"--run holds no method {method or 'that drafts'}: it has {names or 'none'}") from error
    except (IndexError, KeyError, TypeError, ZeroDivisionError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"--run must hold acceptance and seconds of a run with drafts ({reason})") from error
