"""Continue a prompt by one method; what was drafted and accepted is green."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..generation import Generation
from ..generation import generate as decode
from ..grammar import Grammar, GrammarCompiler
from ..methods import METHODS
from ..serve.text import GrowingText, Piece
from .errors import UserError, one_line, read_text
from .loading import Models, check_methods

GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def run(args: argparse.Namespace) -> None:
    """Stream the continuation, then say how it went."""
    check_methods("--method", [args.method])
    prompt, method = _prompt(args), METHODS[args.method]
    models = Models(args)
    ids, drafter = models.encode(prompt, args.max_new_tokens), models.drafter(args.method)
    in_color = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())
    ends = models.target.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    with one_line():
        grammar = _grammar(args, models, ends)
    writer = Writer(models.tokenizer, ids, in_color=in_color)
    print(prompt, end="", flush=True)
    with one_line():
        result = decode(
            models.target,
            drafter,
            [ids],
            sampling=models.sampling(1, args.temperature),
            seed=args.seed,
            rule=method.rule,
            max_new_tokens=args.max_new_tokens,
            draft_length=models.draft_length(args.method, batch=1),
            stop=[*ends, *args.stop],
            tokenizer=models.tokenizer,
            streamer=writer.take,
            grammar=grammar,
        )
    writer.finish()
    print()
    report = summary(result)
    print(f"{DIM}{report}{PLAIN}" if in_color else report, file=sys.stderr)


class Writer:
    """Streams text to standard output: a token is shown as soon as the bytes of its last character are there."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, in_color: bool) -> None:
        """Begin behind the tokens of a prompt."""
        self._growing = GrowingText(tokenizer, before=prompt, has_special=True)
        self._in_color = in_color

    def take(self, request: int, tokens: list[int], accepted: int) -> None:
        """Show the tokens of a step; the streamer of `generate`."""
        self._show(self._growing.push(tokens, accepted))

    def finish(self) -> None:
        """Show what was held back: bytes that make no character."""
        self._show(self._growing.finish())

    def _show(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            is_green = self._in_color and piece.is_accepted
            print(f"{GREEN}{piece.text}{PLAIN}" if is_green else piece.text, end="", flush=True)


def summary(result: Generation) -> str:
    """One line about one request."""
    request = result.statistics[0]
    total = sum(result.seconds.values()) or 1.0
    phases = ", ".join(f"{phase} {100 * seconds / total:.0f} %" for phase, seconds in result.seconds.items())
    looked_at = sum(min(d, a + 1) for d, a in zip(request.drafted, request.accepted, strict=True))
    rate = f"{100 * sum(request.accepted) / looked_at:.0f} % of the drafts accepted; " if looked_at else ""
    return (
        f"{request.tokens} tokens in {request.steps} steps, {request.tokens_per_step:.2f} a step, "
        f"{request.tokens_per_second:.0f} a second; {rate}{phases}"
    )


def _grammar(args: argparse.Namespace, models: Models, ends: list[int]) -> Grammar | None:
    """What the text must obey."""
    file = args.json_schema or args.grammar
    if file is None and args.regex is None:
        return None
    text = None if file is None else read_text("--json-schema" if args.json_schema else "--grammar", file)
    compiler = GrammarCompiler(models.tokenizer, models.vocab, ends, library=args.grammar_library)
    if text is None:
        return compiler.regex(args.regex)
    return compiler.json_schema(text) if args.json_schema else compiler.grammar(text)


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.file is not None:
        raise UserError("a prompt and --file are given: leave out one of them")
    if args.file is not None:
        return read_text("--file", args.file)
    if args.prompt is None and sys.stdin.isatty():
        raise UserError("no prompt: give one as argument, by --file or on standard input")
    return args.prompt if args.prompt is not None else sys.stdin.read()
