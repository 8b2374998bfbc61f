"""Plan the draft length, the static tree and the next improvement from measured numbers."""

from __future__ import annotations

import argparse
import json

from specdec_loop.cli.errors import UserError, one_line

from ..plan import Measured, best_tree, constant, improvements, levels, measured


def run(args: argparse.Namespace) -> None:
    """Print the plan."""
    with one_line():
        now = _given(args)
    if args.children:
        now = now._replace(children=tuple(args.children))
    report(now, args.nodes)


def _given(args: argparse.Namespace) -> Measured:
    if args.run:
        if not args.run.is_file():
            raise UserError(f"--run: there is no file {args.run}: make it with compare --json")
        try:
            written = json.loads(args.run.read_text(encoding="utf-8"))
        except ValueError as error:  # no JSON, or no text
            raise UserError(f"--run: {args.run} is no JSON: give what compare --json wrote") from error
        return measured(written, args.method)
    numbers = (args.acceptance, args.draft_ms, args.verify_ms)
    if None in numbers:
        raise UserError("give --run, or all of --acceptance, --draft-ms and --verify-ms")
    return constant(args.acceptance, args.draft_ms / 1000, args.verify_ms / 1000)


def report(now: Measured, nodes: int) -> None:
    """The plan in words and numbers."""
    best, plain = now.best(), now.speed(0)
    print(f"draft {now.draft_time * 1e3:.3g} ms, verify {now.verify_time * 1e3:.3g} ms ", end="")
    print(f"and {now.token_time * 1e3:.3g} ms for each further token")
    print(f"assumption: {now.assumption}")
    print("  N  tokens/step  tokens/s  speed-up")
    for n in sorted({n for n in (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, now.longest) if n <= now.longest} | {best}):
        mark = "  best" if n == best else ""
        print(f"{n:>3}  {now.tokens(n):>11.3f}  {now.speed(n):>8.1f}  {now.speed(n) / plain:>7.3f}x{mark}")
    if best == 0:
        cost = (now.draft_time + now.token_time) / now.verify_time
        print(f"no draft pays: acceptance must exceed the cost of a draft, {cost:.3f} of a verification")
    elif best == now.longest:
        print(f"longer drafts may be faster: {best} is the longest that is considered")
    for improvement in improvements(now):
        gain = improvement.speed / now.speed(best) - 1
        print(f"{improvement.name}: {100 * gain:+.1f} % ({improvement.speed:.1f} tokens/s, N = {improvement.draft})")
    tree = best_tree(now, nodes)
    shares = ", ".join(f"{share:.3f}" for share in now.children)
    print(f"best static tree of at most {nodes} nodes, ", end="")
    print(f"children accepted {shares} at every depth: levels {levels(tree.parents)}")
    print(f"{tree.tokens:.3f} tokens/step, {tree.speed:.1f} tokens/s, {tree.speed / plain:.3f}x")
    print(f"parents {tree.parents}")
