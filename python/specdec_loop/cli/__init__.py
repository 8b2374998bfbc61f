"""The command line: one file a command, and a line for whoever gave it something that cannot work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import compare, datastore, demo, generate, lossless, plan, theory, train
from .loading import UserError

COMMANDS = {
    "generate": generate,
    "compare": compare,
    "demo": demo,
    "datastore": datastore,
    "train": train,
    "plan": plan,
    "lossless": lossless,
    "theory": theory,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 1 where a test of it failed, 2 where it could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m specdec_loop", description="Speculative decoding of transformers models, every method."
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in COMMANDS.items():
        about = (command.__doc__ or "").splitlines()[0]
        formatter = argparse.ArgumentDefaultsHelpFormatter
        one = commands.add_parser(name, help=about, description=about, formatter_class=formatter)
        command.add_arguments(one)
    args = parser.parse_args(arguments)
    try:
        return COMMANDS[args.command].run(args) or 0
    except UserError as error:
        print(f"specdec_loop {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
