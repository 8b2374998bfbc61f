"""The command line. Parsing imports neither torch nor transformers; a command's module is imported when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

from . import arguments
from .arguments import Formatter
from .errors import UserError


class Command(NamedTuple):
    """A command, whose module in the package's `cli` has a function `run(args)`.

    Attributes:
        about: one sentence, for --help.
        add_arguments: adds its options to a parser.
    """

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


COMMANDS = {
    "generate": Command("Continue a prompt by one method; accepted drafts are green.", arguments.generate),
    "compare": Command("Methods side by side: speed, acceptance, and equality with plain decoding.", arguments.compare),
    "demo": Command("Every method beside plain decoding and transformers' own generate.", arguments.demo),
    "serve": Command("Serve a model over HTTP: OpenAI's completions and chats.", arguments.serve),
    "datastore": Command("Build the datastore of method rest from text files.", arguments.datastore),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 where it could not be run."""
    return run_command("specdec_loop", "Speculative decoding of transformers models.", COMMANDS, words)


def run_command(package: str, description: str, table: Mapping[str, Command], words: Sequence[str] | None) -> int:
    """Parse the command line of `package` and run the command."""
    words = sys.argv[1:] if words is None else words
    parser = Parser(prog=f"python -m {package}", description=description)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (about, add_arguments) in table.items():
        add_arguments(commands.add_parser(name, help=about, description=about, formatter_class=Formatter))
    try:
        try:
            args = parser.parse_args(words)
            return import_module(f"{package}.cli.{args.command}").run(args) or 0
        finally:
            sys.stdout.flush()  # a reader that is gone is noticed here, not when Python ends
    except UserError as error:
        chosen = [word for word in words[:1] if word in table]
        print(f"{' '.join([package, *chosen])}: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{package}: {_missing(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has read enough; nothing more may be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _missing(error: ImportError) -> str:
    """What is not installed; raises the error again if it is none of an optional package."""
    name = (error.name or "").partition(".")[0]
    if str(error).startswith("specdec_loop needs"):  # another release of transformers
        return str(error)
    if not isinstance(error, ModuleNotFoundError) or name in ("", "specdec_kernels", "specdec_loop", "specdec_lab"):
        raise error
    return f"{name} is not installed: pip install {name}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError`."""
        raise UserError(message)
