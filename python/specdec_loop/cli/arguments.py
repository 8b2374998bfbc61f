"""The options of every command, their valid values, and the default models. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

from .errors import UserError

DTYPES = ("float32", "bfloat16", "float16")
STORE = Path("build/datastore.pt")
HEADS = ("medusa", "eagle", "eagle3", "peagle", "mtp", "mtp-layers", "dflash")
KEY_VARIABLE = "SPECDEC_API_KEY"  # of the environment; a command line would show the key to all users of the machine


def find_models() -> Path | None:
    """The repository's folder of models: beside this package, or in the working directory's clone.

    The folder is in the repository and not in the wheel.
    """
    beside, here = Path(__file__).resolve().parents[2] / "models", Path.cwd()
    clones = [folder / "python" / "models" for folder in (here, *here.parents)]
    return next((folder for folder in (beside, *clones) if (folder / "target" / "config.json").is_file()), None)


def default_model(option: str, name: str = "") -> Path:
    """The repository's model of this name, where an option was not given.

    Raises:
        UserError: there is none.
    """
    models = find_models()
    if models is None or not (models / name).is_dir():
        raise UserError(
            f"{option} is not given, and the default models are in the repository only (python/models): run inside a "
            f"clone, or give {option} a folder or a name on the Hugging Face Hub"
        )
    return models / name


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that are values."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_value = action.default not in (None, False, [])
        return super()._get_help_string(action) if has_value else action.help


# --- values


def number(kind: type, least: float, most: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """A parser of a finite number in [least, most], or in (least, most] if `above`."""
    article = "a whole number" if kind is int else "a number"
    form = "d" if kind is int else "g"
    bounds = f"above {least:{form}}" if above else f"of at least {least:{form}}"
    if most < math.inf:
        bounds = f"in {'(' if above else '['}{least:{form}}, {most:{form}}]"

    def parse(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most) or (above and value == least) or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be {article} {bounds}, got {text!r}")
        return value

    return parse


COUNT = number(int, 1)


def _draft_length(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return COUNT(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or auto") from error


def _head(text: str) -> tuple[str, str]:
    kind, _, name = text.partition("=")
    if kind not in HEADS or not name:
        raise argparse.ArgumentTypeError(f"must be KIND=FOLDER, KIND one of {', '.join(HEADS)}, got {text!r}")
    return kind, name


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError(f"must be a text of at least one character, got {text!r}")
    return text


def _depth(text: str) -> float:
    depth = COUNT(text)
    if int(depth) & (int(depth) - 1):
        raise argparse.ArgumentTypeError(f"must be a power of two, got {text!r}")
    return depth


# --- commands


def generate(parser: argparse.ArgumentParser) -> None:
    """Add the options: prompt, method, models."""
    parser.add_argument("prompt", nargs="?", help="text; without it, --file or standard input")
    parser.add_argument("--file", type=Path, help="read the prompt from a file")
    parser.add_argument("--method", default="draft-model", help="`compare --list` names them all")
    parser.add_argument("--max-new-tokens", type=COUNT, default=128)
    parser.add_argument("--temperature", type=number(float, 0), default=0.0, help="0: greedy")
    _add_draft_length(parser)
    about = "a string that ends the text; may be repeated"
    parser.add_argument("--stop", action="append", type=_stop, default=[], help=about)
    limited = parser.add_mutually_exclusive_group()
    limited.add_argument("--json-schema", type=Path, metavar="FILE", help="the text is JSON of the schema in a file")
    limited.add_argument("--regex", help="the text matches a regular expression")
    limited.add_argument("--grammar", type=Path, metavar="FILE", help="the text obeys the grammar in a file")
    _add_grammar_library(parser)
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    _add_models(parser)
    _add_sampling(parser)


def compare(parser: argparse.ArgumentParser) -> None:
    """Add the options: methods, prompts, repetitions."""
    parser.add_argument("--list", action="store_true", help="list the methods, and stop")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="by default all that have what they need")
    parser.add_argument("--temperature", nargs="+", type=number(float, 0), default=[0.0, 0.7])
    parser.add_argument("--batch", nargs="+", type=COUNT, default=[1], help="must divide the number of prompts")
    parser.add_argument("--prompts", nargs="+", type=Path, help="text files, one prompt each; by default held-out code")
    parser.add_argument("--count", type=COUNT, default=8, help="prompts, where none are given")
    parser.add_argument("--prompt-tokens", type=COUNT, default=64, help="of the longest, where none are given")
    parser.add_argument("--max-new-tokens", type=COUNT, default=128)
    _add_draft_length(parser)
    parser.add_argument("--rounds", type=COUNT, default=3, help="each case reports its median")
    parser.add_argument("--rivals", action="store_true", help="add transformers' own generate, at batch 1")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--png", type=Path, help="draw a chart there")
    _add_models(parser)
    _add_sampling(parser)


def demo(parser: argparse.ArgumentParser) -> None:
    """Add the options: how much is measured, output folder."""
    parser.add_argument("--temperature", nargs="+", type=number(float, 0), default=[0.0, 0.7, 1.0])
    parser.add_argument("--count", type=COUNT, default=2, help="prompts")
    parser.add_argument("--max-new-tokens", type=COUNT, default=64)
    parser.add_argument("--rounds", type=COUNT, default=1, help="each case reports its median")
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="where demo.json and demo.png go")
    parser.set_defaults(batch=[1], prompts=None, prompt_tokens=64, draft_length=None)
    _add_models(parser)
    _add_sampling(parser)


def serve(parser: argparse.ArgumentParser) -> None:
    """Add the options: address, method, sizes and limits, models."""
    parser.add_argument("--host", default="127.0.0.1", help="address; others than loopback need an API key")
    parser.add_argument("--port", type=number(int, 0, 65535), default=8000, help="0: a free one")
    about = f"file with API keys, one a line; without it the variable {KEY_VARIABLE}, if it is set"
    parser.add_argument("--api-key-file", type=Path, help=about)
    parser.add_argument("--name", help="of the model, for clients; by default the name of its folder")
    parser.add_argument("--method", default="suffix", help="one of rule match; `compare --list` names them")
    _add_draft_length(parser)
    _add_grammar_library(parser)
    about = "most drafts of a step, given to the requests that are likeliest to accept them; by default no bound"
    parser.add_argument("--draft-budget", type=COUNT, help=about)
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--slots", type=COUNT, default=16, help="choices that run at once; the others wait")
    sizes.add_argument("--pages", type=COUNT, default=1024, help="of keys and values")
    sizes.add_argument("--page-size", type=COUNT, default=16, help="tokens of a page")
    sizes.add_argument("--queue", type=number(int, 0), default=256, help="choices that may wait; then 429")
    sizes.add_argument("--max-tokens", type=COUNT, default=4096, help="new tokens of a choice at most")
    sizes.add_argument("--max-choices", type=COUNT, default=16, help="of a request at most: prompts times n")
    sizes.add_argument("--max-body", type=COUNT, default=1 << 20, help="bytes of a request at most")
    sizes.add_argument("--drain-seconds", type=COUNT, default=30, help="for running requests to end after Ctrl-C")
    _add_models(parser)


def datastore(parser: argparse.ArgumentParser) -> None:
    """Add the options: input and output files."""
    about = "Tokenize text files and sort them for look-ups."
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    build = actions.add_parser("build", help=about, description=about, formatter_class=Formatter)
    build.add_argument("texts", nargs="*", type=Path, help="files, or folders of them; none: the training corpus")
    build.add_argument("--suffix", default=".py", help="of the files in a folder")
    build.add_argument("--tokenizer", help="folder of the target's tokenizer; by default the repository's target")
    build.add_argument("--out", type=Path, default=STORE)
    build.add_argument("--depth", type=_depth, default=16, help="longest match, a power of two")


def _add_models(parser: argparse.ArgumentParser) -> None:
    """Add the options: models, device."""
    models = parser.add_argument_group("models")
    named = "folder of a transformers {}, or its name on the Hugging Face Hub; by default the repository's {}"
    models.add_argument("--target", help=named.format("causal LM", "python/models/target"))
    models.add_argument("--draft", help=named.format("draft model", "python/models/draft"))
    about = "folder of folders called as the kinds of --head; by default the repository's python/models"
    models.add_argument("--heads", type=Path, help=about)
    about = (
        f"folder of a head, or its name on the Hugging Face Hub; KIND is one of {', '.join(HEADS)}; by default the "
        "folder KIND in --heads, of mtp-layers the target's; may be repeated"
    )
    models.add_argument("--head", action="append", type=_head, metavar="KIND=FOLDER", default=[], help=about)
    models.add_argument("--datastore", type=Path, default=STORE, help="file for rest")
    models.add_argument("--device", help="cpu, cuda, cuda:1; by default cuda where torch finds one")
    models.add_argument("--dtype", choices=DTYPES, default="float32", help="of the target's weights")
    about = "of drafters' weights, by default the target's; bfloat16 is faster for a single request on a CPU"
    models.add_argument("--draft-dtype", choices=DTYPES, help=about)
    models.add_argument("--threads", type=COUNT, default=os.cpu_count(), help="of the CPU")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options: filters, seed."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--top-k", type=number(int, 0, 2**31 - 1), default=0, help="0: off")
    sampling.add_argument("--top-p", type=number(float, 0, 1, above=True), default=1.0, help="1: off")
    sampling.add_argument("--min-p", type=number(float, 0, 1), default=0.0, help="0: off")
    sampling.add_argument("--seed", type=number(int, -(2**63), 2**63 - 1), default=0, help="of the first request")


def _add_grammar_library(parser: argparse.ArgumentParser) -> None:
    """Add --grammar-library."""
    about = "of grammars: llguidance reads Lark, xgrammar EBNF"
    parser.add_argument("--grammar-library", choices=("llguidance", "xgrammar"), default="llguidance", help=about)


def _add_draft_length(parser: argparse.ArgumentParser) -> None:
    """Add --draft-length."""
    about = "most drafts of a step, or auto: by measured acceptance and cost; by default the method's"
    parser.add_argument("--draft-length", type=_draft_length, help=about)
