"""Train the target, or the drafters from it and from texts that it wrote."""

from __future__ import annotations

import argparse
from importlib import import_module

from specdec_loop.cli.errors import one_line


def run(args: argparse.Namespace) -> None:
    """Hand over to the training script."""
    with one_line():
        import_module(f"specdec_lab.training.{args.what}").run(args)
