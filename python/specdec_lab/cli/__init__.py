"""The command line of the laboratory."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_loop.cli import Command, run_command

from . import arguments

COMMANDS = {
    "lossless": Command("Test methods, known faults and other samplers for losslessness.", arguments.lossless),
    "theory": Command("Draw Yin et al.'s simulations beside their theorems.", arguments.theory),
    "plan": Command("Find the draft length, the static tree and the next improvement for a run.", arguments.plan),
    "train": Command("Train the target, or its drafters.", arguments.train),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 1 where a test of it failed, 2 where it could not be run."""
    return run_command(
        "specdec_lab", "Losslessness tests, theory and training for speculative decoding.", COMMANDS, words
    )
