"""The options of every command of the laboratory. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from specdec_loop.cli.arguments import COUNT, Formatter, number

EXPERIMENTS = ("first", "next", "streams", "edits", "loop", "texts", "faults", "tradeoff", "batch")
MODELS, WORK = Path("python/models"), Path("build/training")
POSITIVE = number(float, 0, above=True)


def lossless(parser: argparse.ArgumentParser) -> None:
    """Add the options: tests, sample sizes, output files."""
    ours = "by default the repository's python/models"
    parser.add_argument("--target", help=f"transformers folder of the target; {ours}/target")
    parser.add_argument("--draft", help=f"transformers folder of the draft model; {ours}/draft")
    parser.add_argument("--heads", help=f"folder of the folders medusa, eagle, ..; {ours}")
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, help="by default all, but none with --sampler")
    parser.add_argument("--method", action="append", help="only this one, a name in quotes; repeatable")
    parser.add_argument("--samples", type=COUNT, default=1_000_000, help="first tokens of a prompt and method")
    about = "the same with filters, on the first prompt; 0: none"
    parser.add_argument("--filtered", type=number(int, 0), default=50_000, help=about)
    parser.add_argument("--texts", type=COUNT, default=20_000, help="texts of a stream or a joint distribution")
    parser.add_argument("--inject", metavar="FAULT", help="break the sampler: exit status 1 if caught")
    parser.add_argument("--sampler", action="append", default=[], help="module of another sampler; repeatable")
    parser.add_argument("--seconds", type=POSITIVE, default=30.0, help="most of an experiment on another sampler")
    parser.add_argument("--pairs", type=COUNT, default=500, help="pairs of texts a prompt in the win-rate table")
    parser.add_argument("--prompts", type=COUNT, default=200, help="prompts of the win-rate table")
    parser.add_argument("--length", type=COUNT, default=5, help="tokens of its texts")
    _add_workers(parser)
    parser.add_argument("--json", type=Path, help="write the run there")
    parser.add_argument("--page", type=Path, help="write the page there, a Markdown file")
    parser.add_argument("--figures", type=Path, help="write the figures into this folder")


def theory(parser: argparse.ArgumentParser) -> None:
    """Add the options: sample sizes and output files."""
    parser.add_argument("what", choices=["figures"], help="draw the figures")
    parser.add_argument("--folder", type=Path, default=Path("build/theory"), help="where the PNGs go")
    parser.add_argument("--texts", type=number(int, 2), default=4000, help="simulated texts of 50 tokens")
    parser.add_argument("--draws", type=number(int, 2), default=200_000, help="draws of a point beside the front")
    _add_workers(parser)
    parser.add_argument("--json", type=Path, help="write the numbers there")


def plan(parser: argparse.ArgumentParser) -> None:
    """Add the options: a run, or its numbers."""
    parser.add_argument("--run", type=Path, help="JSON file of a run: compare --json")
    parser.add_argument("--method", help="which row of the run; by default the first that drafts")
    parser.add_argument("--acceptance", type=number(float, 0, 1), help="P, measured: accepted / looked at")
    parser.add_argument("--draft-ms", type=number(float, 0), help="milliseconds of one draft")
    parser.add_argument("--verify-ms", type=POSITIVE, help="milliseconds of a verification, target forward included")
    about = "probability that a node's 1st, 2nd, .. child is the accepted one, for a tree; by default those of the run"
    parser.add_argument("--children", type=number(float, 0, 1), nargs="+", help=about)
    parser.add_argument("--nodes", type=COUNT, default=32, help="most nodes of a tree, the root counted")


def train(parser: argparse.ArgumentParser) -> None:
    """Add the trainings and their options."""
    trainings = parser.add_subparsers(dest="what", metavar="what", required=True)
    for name, about, add_arguments in (
        ("target", "Train the target, a small Llama, on the corpus.", _target),
        ("texts", "Let the target write texts for its drafters to learn from.", _texts),
        ("drafters", "Distil the drafters from the target.", _drafters),
    ):
        add_arguments(trainings.add_parser(name, help=about, description=about, formatter_class=Formatter))


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=MODELS / "target", help="folder of the model")
    parser.add_argument("--compile", action="store_true", help="torch.compile: 3 times as fast, one minute to begin")
    _add_training(parser, minutes=60, batch=16, seed=0)


def _texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the target's folder")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the texts")
    parser.add_argument("--count", type=COUNT, default=6144, help="texts")
    parser.add_argument("--length", type=number(int, 65), default=256, help="tokens of a text, 64 from the corpus")
    parser.add_argument("--batch", type=COUNT, default=192, help="texts at a time")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--threads", type=COUNT, default=2)
    parser.add_argument("--bfloat16", action="store_true", help="half the time where the processor has AMX")


def _drafters(parser: argparse.ArgumentParser) -> None:
    about = "of draft, medusa, eagle, eagle3, mtp, dflash; none: all"
    parser.add_argument("kinds", nargs="*", metavar="kind", help=about)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of target and drafters")
    parser.add_argument("--texts", type=Path, help="the target's own, from `train texts`: half of each batch")
    parser.add_argument("--compile", action="store_true", help="torch.compile: a third faster, 2 minutes to begin")
    _add_training(parser, minutes=8, batch=8, seed=1)


def _add_training(parser: argparse.ArgumentParser, *, minutes: float, batch: int, seed: int) -> None:
    """Add the options that both trainings of networks share."""
    parser.add_argument("--work", type=Path, default=WORK, help="folder of checkpoints and curves")
    parser.add_argument("--minutes", type=POSITIVE, default=minutes, help="of processor time in all, for each network")
    parser.add_argument("--peak", type=POSITIVE, default=4e-3, help="learning rate")
    parser.add_argument("--length", type=COUNT, default=256, help="tokens of a window")
    parser.add_argument("--batch", type=COUNT, default=batch, help="windows of a step")
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--threads", type=COUNT, default=2)
    parser.add_argument("--bfloat16", action="store_true", help="autocast: faster where the processor has AMX")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=COUNT, default=len(os.sched_getaffinity(0)), help="processes")
