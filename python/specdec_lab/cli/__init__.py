"""The command line of the laboratory: one file a command."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_loop.cli import run_command

from . import lossless, plan, theory, train

COMMANDS = {"lossless": lossless, "theory": theory, "plan": plan, "train": train}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 1 where a test of it failed, 2 where it could not be run."""
    return run_command(
        "specdec_lab", "Losslessness tests, theory and training for speculative decoding.", COMMANDS, arguments
    )
