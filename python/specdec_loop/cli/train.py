"""Train the target, or the drafters from it."""

from __future__ import annotations

import argparse
from importlib import import_module

WHAT = ("target", "drafters")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to train; the rest is that script's."""
    parser.add_argument("what", choices=WHAT, help="`train target --help` and `train drafters --help` say more")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of that training")


def run(args: argparse.Namespace) -> None:
    """Hand over to the training script."""
    import_module(f"specdec_loop.training.{args.what}").main(args.options)
