"""The command ``plan``: what draft length, which static tree, and which improvement next, from measured numbers.

With P the probability that a draft is accepted, a draft of N tokens costs N T_draft + T_verify and yields
(1 - P^(N+1)) / (1 - P) tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import theory

LONGEST = 64  # drafts of a step that are considered
BETTER = 0.1  # an improvement, as a share of what is left to gain or to save


class Measured(NamedTuple):
    """What a plan needs.

    Attributes:
        acceptance: P, of one draft given that those before it were accepted.
        draft_time: seconds of one draft.
        verify_time: seconds of a step without its drafts.
    """

    acceptance: float
    draft_time: float
    verify_time: float

    def speed(self, draft: int) -> float:
        """Tokens a second with drafts of this length."""
        return float(theory.throughput(self.acceptance, draft, self.draft_time, self.verify_time))

    def best(self) -> int:
        """Draft length of the highest speed."""
        cost = self.draft_time / self.verify_time
        return int(theory.optimal_draft(self.acceptance, cost, longest=LONGEST))


class Improvement(NamedTuple):
    """What one change would buy.

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
        "a tenth of the rejections avoided": now._replace(acceptance=now.acceptance + BETTER * (1 - now.acceptance)),
        "drafts a tenth faster": now._replace(draft_time=now.draft_time * (1 - BETTER)),
        "verification a tenth faster": now._replace(verify_time=now.verify_time * (1 - BETTER)),
    }
    found = [Improvement(name, then.speed(then.best()), then.best()) for name, then in changed.items()]
    return sorted(found, key=lambda improvement: -improvement.speed)


def best_tree(acceptance: Sequence[float], now: Measured, budget: int) -> tuple[list[int], float, float]:
    """(parents, tokens a step, tokens a second) of the fastest static tree of at most `budget` nodes.

    A level of a tree is one forward of the drafter, whatever its width, and verification takes `verify_time`.
    """
    best: tuple[list[int], float, float] | None = None
    for depth in range(budget):
        parents, tokens = theory.best_tree(acceptance, budget, depth) if depth else ([-1], 1.0)
        speed = tokens / (depth * now.draft_time + now.verify_time)
        if best is None or speed > best[2]:
            best = parents, tokens, speed
        if depth and len(levels(parents)) <= depth:
            break  # deeper trees are the same tree
    assert best is not None
    return best


def levels(parents: Sequence[int]) -> list[int]:
    """How many nodes each depth has, the root first.

    Example:
        >>> from specdec_loop.plan import levels
        >>> levels([-1, 0, 0, 1])
        [1, 2, 1]
    """
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    return torch.bincount(torch.tensor(depth)).tolist()


def measured(run: dict[str, Any], method: str | None = None) -> Measured:
    """From the JSON of a run.

    Either what `compare --json` writes: of the first row of the method (of the first that drafts) its acceptance, and
    its seconds of a step by phase. Or what `generate` reports: ``drafted`` and ``accepted`` (a number a step) and
    ``seconds`` by phase of all steps.
    """
    try:
        if "rows" in run:
            rows = [r for r in run["rows"] if r["acceptance"] is not None and method in (None, r["method"])]
            acceptance, seconds, steps = rows[0]["acceptance"], rows[0]["seconds"], 1
            drafts = len(rows[0]["acceptance_by_position"])
        else:
            drafted, accepted, seconds = run["drafted"], run["accepted"], run["seconds"]
            looked_at = sum(min(d, a + 1) for d, a in zip(drafted, accepted, strict=True))
            acceptance, steps, drafts = sum(accepted) / looked_at, len(drafted), sum(drafted)
        verify_time = sum(seconds[phase] for phase in ("target", "verify", "commit")) / steps
        return Measured(acceptance, seconds["draft"] / drafts, verify_time)
    except (IndexError, KeyError, TypeError, ZeroDivisionError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"plan: --run must hold acceptance and seconds of a run with drafts ({reason})") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--run", help="JSON file of a run: compare --json, or drafted, accepted and seconds")
    parser.add_argument("--method", help="which row of the run; by default the first that drafts")
    parser.add_argument("--acceptance", type=float, help="P, measured: accepted / looked at")
    parser.add_argument("--draft-ms", type=float, help="milliseconds of one draft")
    parser.add_argument("--verify-ms", type=float, help="milliseconds of a verification, target forward included")
    parser.add_argument(
        "--children", type=float, nargs="+", help="acceptance of a node's 1st, 2nd, .. child, for a tree"
    )
    parser.add_argument("--nodes", type=int, default=32, help="most nodes of a tree, the root counted")
    parser.add_argument("--figure", help="draw throughput over N into this PNG")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 2 where numbers are missing."""
    try:
        now = _given(args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    report(now, args.children or [], args.nodes, print)
    if args.figure:
        draw(now, Path(args.figure))
    return 0


def _given(args: argparse.Namespace) -> Measured:
    if args.run:
        return measured(json.loads(Path(args.run).read_text()), args.method)
    numbers = (args.acceptance, args.draft_ms, args.verify_ms)
    if None in numbers or not 0 <= args.acceptance <= 1 or args.draft_ms < 0 or args.verify_ms <= 0:
        raise ValueError("plan: give --run, or --acceptance in [0, 1], --draft-ms >= 0 and --verify-ms > 0")
    if not all(0 <= a <= 1 for a in args.children or []) or args.nodes < 1:
        raise ValueError("plan: --children must be in [0, 1] and --nodes >= 1")
    return Measured(args.acceptance, args.draft_ms / 1000, args.verify_ms / 1000)


def report(now: Measured, children: Sequence[float], nodes: int, say: Callable[[str], object]) -> None:
    """The plan in words and numbers."""
    best, plain = now.best(), now.speed(0)
    cost = now.draft_time / now.verify_time
    say(f"acceptance {now.acceptance:.3f}, draft {now.draft_time * 1e3:.3g} ms, verify {now.verify_time * 1e3:.3g} ms")
    say("  N  tokens/step  tokens/s  speed-up")
    for n in sorted({0, 1, 2, 3, 4, 5, 6, 8, 12, 16, best}):
        speed, tokens = now.speed(n), float(theory.expected_tokens(now.acceptance, n))
        say(f"{n:>3}  {tokens:>11.3f}  {speed:>8.1f}  {speed / plain:>7.3f}x{'  best' if n == best else ''}")
    if best == 0:
        say(f"no draft pays: acceptance must exceed the draft's cost, {cost:.3f} of a verification")
    elif best == LONGEST:
        say(f"longer drafts would pay still: {LONGEST} is the most that is considered")
    for improvement in improvements(now):
        gain = improvement.speed / now.speed(best) - 1
        say(f"{improvement.name}: {100 * gain:+.1f} % ({improvement.speed:.1f} tokens/s, N = {improvement.draft})")
    if children:
        parents, tokens, speed = best_tree(children, now, nodes)
        say(f"best static tree of {len(parents)} nodes, levels {levels(parents)}:")
        say(f"{tokens:.3f} tokens/step, {speed:.1f} tokens/s")
        say(f"parents {parents}")


def draw(now: Measured, to: Path) -> None:
    """Throughput over N, and what each improvement makes of it."""
    from .lossless.figures import canvas, save

    figure, axes = canvas(1, 1, 3.4)
    axis, best = axes[0, 0], now.best()
    lengths = range(max(12, min(2 * best, LONGEST)) + 1)
    axis.plot(lengths, [now.speed(n) for n in lengths], marker=".", label="now")
    for n, word in ((best, f"best N = {best}"), (0, "plain")):
        axis.annotate(word, (n, now.speed(n)), (4, -14), textcoords="offset points", fontsize=8)
    better = now._replace(acceptance=now.acceptance + BETTER * (1 - now.acceptance))
    axis.plot(lengths, [better.speed(n) for n in lengths], linewidth=0.8, label="a tenth of the rejections avoided")
    axis.set_xlabel("drafts a step, N", fontsize=8)
    axis.set_ylabel("tokens a second", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False)
    save(figure, to)
