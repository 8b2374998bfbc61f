"""Continue a prompt by one method; what was drafted and accepted is green."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..generation import Generation, Streamer
from ..generation import generate as decode
from ..grammar import Grammar, GrammarCompiler
from ..methods import METHODS
from ..serve.text import GrowingText
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
            streamer=writer(models.tokenizer, in_color=in_color),
            grammar=grammar,
        )
    print()
    report = summary(result)
    print(f"{DIM}{report}{PLAIN}" if in_color else report, file=sys.stderr)


def writer(tokenizer: Any, *, in_color: bool) -> Streamer:
    """Streams text to standard output: a token is shown as soon as the bytes of its last character are there."""
    growing = GrowingText(tokenizer, has_special=True)

    def write(request: int, tokens: list[int], accepted: int) -> None:
        for piece in growing.push(tokens, accepted):
            print(f"{GREEN}{piece.text}{PLAIN}" if in_color and piece.is_accepted else piece.text, end="", flush=True)

    return write


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
