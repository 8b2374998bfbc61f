"""The command line: one file a command; invalid input prints a one-line error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from . import compare, datastore, demo, generate
from .loading import UserError

COMMANDS = {"generate": generate, "compare": compare, "demo": demo, "datastore": datastore}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 where it could not be run."""
    return run_command("specdec_loop", "Speculative decoding of transformers models.", COMMANDS, arguments)


def run_command(package: str, description: str, modules: dict[str, ModuleType], arguments: Sequence[str] | None) -> int:
    """Parse the command line of `package`, whose commands are modules, and run the command."""
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=description)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in modules.items():
        about = (command.__doc__ or "").splitlines()[0]
        formatter = argparse.ArgumentDefaultsHelpFormatter
        command.add_arguments(commands.add_parser(name, help=about, description=about, formatter_class=formatter))
    args = parser.parse_args(arguments)
    try:
        return modules[args.command].run(args) or 0
    except UserError as error:
        print(f"{package} {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
