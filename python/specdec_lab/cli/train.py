"""Train the target, or the drafters from it and from what it says."""

from __future__ import annotations

import argparse
from importlib import import_module

WHAT = ("target", "texts", "drafters")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the training script and its own options."""
    parser.add_argument("what", choices=WHAT, help="`train target --help` says more, and so on")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of that training")


def run(args: argparse.Namespace) -> None:
    """Hand over to the training script."""
    import_module(f"specdec_lab.training.{args.what}").main(args.options)
